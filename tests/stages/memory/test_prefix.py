"""Sharing of prompt beginnings: the tree, and the ledger's references."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.stages.memory.kind_tables import PAST, Kind
from deepinfer.stages.memory.ledger import BlockLedger, LedgerError, Match
from deepinfer.stages.memory.prefix import PrefixTree, chain_keys, root_key

BLOCK = 4


def keys(*tokens: int, salt: str = "") -> list[bytes]:
    return chain_keys(root_key("model", "fp16", salt), np.array(tokens, dtype=np.int32), BLOCK)


def fill(ledger: BlockLedger, rid: int, chain: list[bytes]) -> None:
    for index, key in enumerate(chain):
        ledger.filled(rid, index, key)


def begin(ledger: BlockLedger, rid: int, chain: list[bytes]) -> None:
    ledger.begin(rid, 0, ledger.match(chain, lambda blocks: 0))


def test_keys_cover_full_blocks_only_and_depend_on_everything_before_them():
    assert len(keys(*range(11))) == 2
    assert keys(*range(8))[0] == keys(*range(4))[0]
    assert keys(9, 1, 2, 3, 4, 5, 6, 7)[1] != keys(0, 1, 2, 3, 4, 5, 6, 7)[1]
    assert keys(*range(4), salt="a") != keys(*range(4), salt="b")


def test_keys_can_be_continued_from_a_known_one():
    whole = keys(*range(16))
    rest = chain_keys(whole[1], np.arange(8, 16, dtype=np.int32), BLOCK)
    assert whole[2:] == rest


def test_a_block_is_found_once_it_is_filled_and_stays_when_its_request_has_gone():
    tree = PrefixTree()
    ledger = BlockLedger(4, tree)
    chain = keys(*range(8))
    first, second = ledger.grow(1, 2)
    assert tree.match(chain) == []
    ledger.filled(1, 0, chain[0])
    assert tree.match(chain) == [first]
    ledger.filled(1, 1, chain[1])
    ledger.release(1)
    ledger.audit()
    assert (ledger.free, ledger.idle, ledger.available) == (2, 2, 4)
    assert tree.match(chain) == [first, second]
    begin(ledger, 2, chain)
    ledger.audit()
    assert ledger.available == 2


def test_a_shared_block_comes_back_when_the_last_holder_lets_go():
    tree = PrefixTree()
    ledger = BlockLedger(3, tree)
    chain = keys(*range(4))
    ledger.grow(1, 1)
    fill(ledger, 1, chain)
    begin(ledger, 2, chain)
    assert ledger.exclusive(1) == 0
    ledger.release(1)
    assert ledger.available == 2
    ledger.release(2)
    ledger.release(2)
    assert ledger.available == 3
    ledger.audit()


def test_an_equal_block_that_was_there_first_is_used_and_the_own_one_is_freed():
    ledger = BlockLedger(4, PrefixTree())
    chain = keys(*range(4))
    (own,) = ledger.grow(1, 1)
    (duplicate,) = ledger.grow(2, 1)
    assert not ledger.filled(1, 0, chain[0])
    assert ledger.filled(2, 0, chain[0])
    assert ledger.tables(2)[0] == [own]
    assert ledger.grow(3, 1) == [duplicate]
    ledger.audit()


def test_the_least_recently_used_leaf_is_evicted_first_and_never_one_that_is_held():
    tree = PrefixTree()
    ledger = BlockLedger(4, tree)
    old, new = keys(*range(8)), keys(7, 7, 7, 7, 8, 8, 8, 8)
    ledger.grow(1, 2)
    fill(ledger, 1, old)
    ledger.grow(2, 2)
    fill(ledger, 2, new)
    ledger.release(1)
    ledger.release(2)
    begin(ledger, 3, old[:1])
    ledger.grow(4, 1)
    assert len(tree.match(old)) == 1, "the end of the older chain went first"
    assert len(tree.match(new)) == 2
    ledger.grow(4, 3)
    assert len(tree.match(new)) == 0
    assert len(tree.match(old)) == 1
    with pytest.raises(LedgerError, match="1 blocks of 0"):
        ledger.grow(4, 4)
    ledger.audit()


def test_blocks_that_came_back_from_the_host_do_not_continue_a_chain_that_they_do_not_hold():
    tree = PrefixTree()
    ledger = BlockLedger(6, tree)
    chain = keys(*range(8))
    ledger.grow(1, 2)
    fill(ledger, 1, chain[:1])
    ledger.release(1)
    ledger.grow(1, 2)
    assert not ledger.filled(1, 1, chain[1])
    assert len(tree.match(chain)) == 1
    ledger.audit()


FULL, SLIDING = Kind(1), Kind(1, slides=True)


def last_two(blocks: int) -> int:
    """The first block that a window of two blocks sees."""
    return max(0, blocks - 2)


def test_a_beginning_is_found_only_while_what_the_window_sees_at_its_end_is_known():
    ledger = BlockLedger(8, PrefixTree(), (FULL, SLIDING))
    chain = keys(*range(16))
    ledger.grow(1, 4)
    fill(ledger, 1, chain)
    full, sliding = ledger.tables(1)
    ledger.let_past(1, 2)
    assert ledger.tables(1) == [full, [PAST, PAST, *sliding[2:]]]
    assert (ledger.idle, ledger.free) == (2, 0)
    ledger.audit()
    assert ledger.match(chain, last_two) == Match(4, 2, (full, sliding[2:]))
    assert ledger.match(chain[:2], last_two) == Match(2, 0, (full[:2], sliding[:2]))
    assert ledger.saved(ledger.match(chain[:2], last_two)) == 2, "what is idle would have to be taken"
    ledger.grow(2, 1)
    assert sorted(row for table in ledger.tables(2) for row in table) == sorted(sliding[:2]), "the oldest went first"
    assert ledger.match(chain, last_two) == Match(4, 2, (full, sliding[2:]))
    assert ledger.match(chain[:3], last_two).blocks == 0, "of its window one block is gone"
    ledger.begin(3, 2, ledger.match(chain, last_two))
    assert ledger.tables(3) == [full, [PAST, PAST, *sliding[2:]]]
    ledger.release(1)
    assert ledger.available == 0
    ledger.release(3)
    ledger.audit()
    assert ledger.idle == 6


def test_where_all_layers_slide_a_beginning_needs_nothing_before_its_window():
    ledger = BlockLedger(4, PrefixTree(), (SLIDING,))
    chain = keys(*range(16))
    ledger.grow(1, 4)
    fill(ledger, 1, chain)
    (sliding,) = ledger.tables(1)
    ledger.let_past(1, 2)
    ledger.grow(2, 2)
    assert ledger.match(chain, last_two) == Match(4, 2, (sliding[2:],))
    ledger.release(1)
    ledger.release(2)
    ledger.audit()
    assert ledger.available == 4


def test_what_slides_stays_while_another_request_still_sees_it():
    ledger = BlockLedger(6, kinds=(FULL, SLIDING))
    ledger.grow(1, 2)
    ledger.fork(1, 2, 2, 0)
    ledger.let_past(1, 1)
    assert ledger.free == 2
    assert ledger.exclusive_places(2) == {}
    ledger.let_past(2, 1)
    assert ledger.free == 3
    ledger.audit()


def test_the_audit_sees_a_reference_that_nobody_has():
    ledger = BlockLedger(2, PrefixTree())
    ledger.grow(1, 1)
    ledger.kinds[0]._references[0] = 2
    with pytest.raises(LedgerError):
        ledger.audit()
