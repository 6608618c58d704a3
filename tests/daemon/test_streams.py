"""Prefill, decode and offload on streams of their own: events alone must order every two accesses to a KV block.

The host shim's streams remember what they waited for. Every access of every stage is noted with the clock of its
stream, and two accesses of which one writes must be ordered by those clocks, whatever the threads happened to do.
"""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from tiny import save_tiny_llama

from deepinfer.daemon.engine import Engine
from deepinfer.kernels.cuda.host_stream import HostStream
from deepinfer.stages import runner
from deepinfer.stages.lanes import Lane
from deepinfer.stages.offload import copy_rows
from deepinfer.stages.runner import ModelRunner

PROMPTS = ["The quick brown fox", "jumps over", "the lazy dog and then it runs away", "The quick brown fox", "again"]
BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-wide"), head_dim=64)


class Accesses:
    """Of every block the last write, and each stream's last read since."""

    def __init__(self) -> None:
        self.pool = None
        self.races: list[str] = []
        self.copied = 0
        self.ordered: Counter[tuple[str, str]] = Counter()
        """Accesses to the same block from two streams: first the earlier one's."""
        self._last: dict[int, dict[tuple[str, bool], int]] = {}
        self._lock = threading.Lock()

    def touch(self, blocks, writes: bool) -> None:
        stream = HostStream.current()
        assert stream is not None, "a block is touched outside any stream"
        with self._lock:
            for block in map(int, blocks):
                earlier = self._last.setdefault(block, {})
                for (name, wrote), number in earlier.items():
                    if name == stream.name or not (wrote or writes):
                        continue
                    self.ordered[name, stream.name] += 1
                    if not stream.knows(name, number):
                        self.races.append(f"{stream.name} touches block {block} beside {name}")
                if writes:
                    earlier.clear()
                earlier[stream.name, writes] = stream.now

    def spans(self, spans) -> None:
        for span in spans:
            end = span.start + span.count
            table = span.request.table[0]
            self.touch(table[: -(-end // BLOCK_SIZE)], writes=False)
            self.touch(table[span.start // BLOCK_SIZE : -(-end // BLOCK_SIZE)], writes=True)

    def shared(self, pairs) -> None:
        """Blocks that are copied because forks would both write there."""
        self.copied += len(pairs)
        for source, destination in pairs:
            self.touch([source], writes=False)
            self.touch([destination], writes=True)

    def copy(self, destination, source) -> None:
        for tensor, writes in ((source, False), (destination, True)):
            first, rest = divmod(tensor.data_ptr() - self.pool.data_ptr(), self.pool.stride(0))
            if rest == 0 and 0 <= first < len(self.pool):
                self.touch(range(first, first + len(tensor)), writes)
        copy_rows(destination, source)


def run(path, monkeypatch) -> Accesses:
    accesses, compute, copy_blocks = Accesses(), ModelRunner._run, runner._copy_blocks

    def noted(self, spans):
        accesses.spans(spans)
        return compute(self, spans)

    def noted_copies(pool, pairs):
        accesses.shared(pairs)
        copy_blocks(pool, pairs)

    monkeypatch.setattr(ModelRunner, "_run", noted)
    monkeypatch.setattr(runner, "_copy_blocks", noted_copies)
    settings = {"num_blocks": 12, "block_size": BLOCK_SIZE, "kv_cache_dtype": "int8", "residency_quantum": 1}
    with Engine(
        path, device="host-emulation", prefill_chunk_tokens=7, copy=lambda *rows: accesses.copy(*rows), **settings
    ) as engine:
        accesses.pool = engine.host.pool.data
        for _ in range(2):
            fields = {"max_new_tokens": 16, "ignore_eos": True}
            streams = [engine.generate(prompt, n=1 + place % 2, **fields) for place, prompt in enumerate(PROMPTS)]
            results = [stream.result() for stream in streams]
            assert all(len(result.ids) == 16 for result in results)
        assert engine.status()["engine"]["prefill_beside_decode"] is True
    assert HostStream.current() is None
    return accesses


def test_every_access_to_a_block_is_ordered_by_events(wide_path, monkeypatch):
    accesses = run(wide_path, monkeypatch)
    assert accesses.races == []
    assert accesses.copied > 0
    met = set(accesses.ordered)
    assert met >= {("prefill", "decode"), ("decode", "prefill"), ("decode", "offload"), ("offload", "decode")}


@pytest.mark.parametrize("deaf", ["decode", "prefill", "offload"])
def test_a_stream_that_does_not_wait_shows(wide_path, monkeypatch, deaf):
    wait = HostStream.wait
    monkeypatch.setattr(HostStream, "wait", lambda self, event: self.name == deaf or wait(self, event))
    assert any(race.startswith(deaf) for race in run(wide_path, monkeypatch).races)


def test_an_event_that_is_recorded_before_the_work_shows(wide_path, monkeypatch):
    in_order = Lane._in_order

    def too_early(self, function):
        event = self._stream.record()
        try:
            return in_order(self, function)
        finally:
            self._finished = event

    monkeypatch.setattr(Lane, "_in_order", too_early)
    assert run(wide_path, monkeypatch).races


def test_the_cpu_computes_one_after_the_other_and_says_so(tiny_path):
    with Engine(tiny_path, device="cpu", num_blocks=24) as engine:
        assert engine.status()["engine"]["prefill_beside_decode"] is False
        assert engine.host.lanes.prefill._thread is engine.host.lanes.decode._thread
