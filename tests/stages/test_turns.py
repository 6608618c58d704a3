"""Connections take turns: the numbers that say who comes next, and the policy that follows them."""

from __future__ import annotations

import random
from collections import Counter

from deepinfer.stages.memory.entries import ResidencyConfig
from deepinfer.stages.memory.ledger import BlockLedger
from deepinfer.stages.memory.residency import Residency
from deepinfer.stages.turns import TICKS, Turns


class Queue:
    """Requests that wait, served one at a time by their turns; equal turns by arrival."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.waiting: list[tuple[int, int, int, bytes]] = []
        self.arrivals = 0
        self.served: list[bytes] = []

    def ask(self, who: bytes, priority: int = 0) -> None:
        self.arrivals += 1
        self.waiting.append((-priority, self.turns.take(priority, who), self.arrivals, who))

    def serve(self) -> bytes:
        first = min(self.waiting)
        self.waiting.remove(first)
        self.turns.leave(-first[0], first[3], started=True)
        self.served.append(first[3])
        return first[3]

    def cancel(self, index: int) -> None:
        priority, _, _, who = self.waiting.pop(index)
        self.turns.leave(-priority, who, started=False)


def test_one_connection_alone_is_served_in_the_order_of_arrival():
    queue = Queue()
    for _ in range(50):
        queue.ask(b"a")
    arrivals = [entry[2] for entry in sorted(queue.waiting)]
    assert arrivals == sorted(arrivals)


def test_a_single_request_waits_for_one_turn_and_not_for_a_thousand():
    queue = Queue()
    for _ in range(1000):
        queue.ask(b"a")
    for _ in range(137):
        queue.serve()
    queue.ask(b"b")
    queue.serve()
    queue.serve()
    assert b"b" in queue.served[137:139]


def test_connections_that_always_wait_are_served_equally_however_much_each_has_sent():
    queue = Queue()
    for who, count in ((b"a", 900), (b"b", 300), (b"c", 100)):
        for _ in range(count):
            queue.ask(who)
    for _ in range(300):
        queue.serve()
    assert Counter(queue.served) == {b"a": 100, b"b": 100, b"c": 100}


def test_random_arrivals_and_cancels_stay_fair_and_leave_nothing():
    """Between any two moments in which both of two connections wait all the time, neither is ahead by more than two."""
    rng = random.Random(5)
    for _ in range(30):
        queue = Queue()
        names = [bytes([number]) for number in range(rng.randint(2, 6))]
        backlogged, flows = names[:2], names[2:]
        for who in backlogged:
            for _ in range(rng.randint(150, 300)):
                queue.ask(who)
        lead = []
        for _ in range(200):
            for who in flows:
                if rng.random() < 0.3:
                    queue.ask(who)
            if rng.random() < 0.2:
                others = [index for index, entry in enumerate(queue.waiting) if entry[3] in flows]
                if others:
                    queue.cancel(rng.choice(others))
            queue.serve()
            served = Counter(queue.served)
            lead.append(served[backlogged[0]] - served[backlogged[1]])
        assert max(lead) - min(lead) <= 2
        while queue.waiting:
            queue.serve()
        assert queue.turns._lanes == {}


def test_newcomers_without_end_do_not_starve_a_backlog():
    """Each of them has a connection of its own, so each is ahead of the backlog's later requests when it comes."""
    queue = Queue()
    for _ in range(40):
        queue.ask(b"patient")
    for number in range(400):
        queue.ask(b"new %d" % number)
        queue.serve()
    assert queue.served.count(b"patient") >= 20
    lane = queue.turns._lanes[0]
    assert len(lane.next) <= 2 * len(lane.waiting) + 65


def test_priorities_come_before_turns():
    queue = Queue()
    for _ in range(5):
        queue.ask(b"a", priority=1)
    queue.ask(b"b", priority=0)
    assert [queue.serve() for _ in range(6)] == [b"a"] * 5 + [b"b"]


def test_the_policy_brings_newcomers_in_by_their_turns_and_parked_ones_first():
    policy = Residency(BlockLedger(1, None), 4, ResidencyConfig(max_running=1))
    for rid, turn in ((1, 5 * TICKS), (2, 3 * TICKS), (3, 3 * TICKS), (4, 0)):
        policy.submit(rid, 2, 3, turn=turn)
    policy.entries[1].parks = 1
    order = []
    for _ in range(4):
        (rid,) = policy.moves().admitted
        order.append(rid)
        policy.end(rid)
    assert order == [1, 4, 2, 3]
