"""The decode stage: owns the pool and the policy, and runs the engine's turns.

A turn: resume, admit, one decode step over every resident request, then the next prefill chunk. With `overlap` off (the
CPU, where two loops on the same cores only hurt) no step runs while a chunk is out, so that a running stream waits for
at most one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import zmq

from deepinfer.stages.block_tables import BlockTables
from deepinfer.stages.engine_stats import engine_stats
from deepinfer.stages.memory.entries import Moves, OwnCopy, State
from deepinfer.stages.memory.pool import KVPool
from deepinfer.stages.memory.prefix import root_key
from deepinfer.stages.memory.residency import Residency
from deepinfer.stages.memory.sizes import blocks_for
from deepinfer.stages.messages import (
    Cancel,
    ChunkDone,
    ChunkItem,
    CopyMeasured,
    Drain,
    DropPayload,
    EngineStopped,
    Halt,
    PrefillChunk,
    Snapshot,
    Submit,
    SwapIn,
    SwapInDone,
    SwapOut,
    SwapOutDone,
)
from deepinfer.stages.news import End, News
from deepinfer.stages.pace import Pace
from deepinfer.stages.preemption import Preemption
from deepinfer.stages.request import Request
from deepinfer.stages.runner import ModelRunner, Outcome, Span
from deepinfer.stages.stage import Stage, monotonic
from deepinfer.stages.stats import EngineCounters
from deepinfer.stages.transfers import Transfers

SNAPSHOT_SECONDS = 0.25


class DecodeStage(Stage):
    """Owns the pool, the ledger, the residency policy, and the records of all requests of the engine.

    `requests` is shared with prefill, which reads the records that a PrefillChunk names while it is out.
    """

    name = "decode"

    def __init__(
        self,
        context: zmq.Context,
        inbox: str,
        outboxes: Mapping[str, str],
        runner: ModelRunner,
        pool: KVPool,
        residency: Residency,
        preemption: Preemption,
        pace: Pace,
        requests: dict[int, Request],
        eos_token_ids: frozenset[int],
        sharing_domain: tuple[str, ...] = (),
        overlap: bool = False,
    ) -> None:
        super().__init__(context, inbox, outboxes)
        self._runner = runner
        self._pool = pool
        self._residency = residency
        self._ledger = residency.ledger
        self.preemption = preemption
        self._pace = pace
        self._requests = requests
        self._tables = BlockTables(requests, residency)
        self._eos = eos_token_ids
        self._sharing_domain = sharing_domain
        self._overlap = overlap
        self._chunk_out = False
        self._draining = False
        self._last_snapshot = 0.0
        self.counters = EngineCounters()
        self._transfers = Transfers(self.counters, pool.layout.row_bytes)
        self._news = News(partial(self.send, "admission"), requests, self.counters, eos_token_ids)
        self.on(Submit, self._on_submit)
        self.on(Cancel, self._on_cancel)
        self.on(Drain, self._on_drain)
        self.on(ChunkDone, self._on_chunk_done)
        self.on(SwapOutDone, self._on_swap_out_done)
        self.on(SwapInDone, self._on_swap_in_done)
        self.on(CopyMeasured, self.preemption.measured)

    # --- messages ---------------------------------------------------------------------------------------------

    def _on_submit(self, message: Submit) -> None:
        self._enter(message)
        for fork in message.forks:
            params = msgspec.structs.replace(message.params, seed=fork.seed)
            alike = msgspec.structs.replace(message, rid=fork.rid, params=params, clock=fork.clock)
            self._enter(alike, leader=message.rid)

    def _enter(self, message: Submit, leader: int | None = None) -> None:
        layout = self._pool.layout
        total = len(message.prompt) // 4 + message.params.max_new_tokens - 1
        root = root_key(*self._sharing_domain, message.cache_salt)
        blocks = blocks_for(total, layout.block_size)
        request = Request(message, blocks, root, layout.block_size, layout.num_groups)
        if not self._residency.fits_alone(total):
            # Admission refuses this earlier, with the numbers; a request must never wait for what cannot come.
            self.counters.requests_kv_exhausted_total += 1
            self._news.refused(request, End(request.rid, "kv_exhausted"))
            return
        reason = request.finish_reason(self._eos) if request.generated else None
        if reason is not None:
            # An engine before this one produced its last token, and died before it could say that it was the last.
            self._news.finished(request, End(request.rid, reason))
            return
        self._requests[message.rid] = request
        keys = request.keys([]) if self._ledger.tree is not None else []
        self._residency.submit(message.rid, request.length, total, message.priority, keys, leader, message.turn)

    def _on_cancel(self, message: Cancel) -> None:
        if message.rid in self._requests:
            self._finish(message.rid, message.reason)

    def _on_drain(self, message: Drain) -> None:
        self._draining = True
        if message.now:
            for rid in list(self._requests):
                self._finish(rid, "error", "shutting_down", "the daemon is stopping")

    def _on_chunk_done(self, message: ChunkDone) -> None:
        self._chunk_out = False
        self.counters.prefill_chunks_total += 1
        self.counters.prefill_seconds += message.seconds
        tokens = {item.rid: item for item in message.sampled}
        outcomes = []
        for chunk in message.items:
            request = self._requests[chunk.rid]
            alive = self._residency.chunk_done(chunk.rid, chunk.count)
            if alive:
                self._tables.register_filled(chunk.rid)
                request.clock.prefill += message.seconds
                self.counters.computed(request.note_computed(chunk.start + chunk.count), chunk.count)
            begun = self._residency.fork(chunk.rid) if alive and chunk.last else []
            self._news.forked(begun, chunk.start + chunk.count)
            if alive:
                self._residency.let_past(chunk.rid)
            for rid in (chunk.rid, *chunk.forks):
                if rid not in self._residency.entries:  # It ended while its chunk was out.
                    del self._requests[rid]
            for rid in (chunk.rid, *begun) if alive else ():
                if rid in message.errors or rid in tokens:
                    outcomes.append(Outcome(rid, tokens.get(rid), message.errors.get(rid, "")))
        self._deliver(outcomes)

    def _on_swap_out_done(self, message: SwapOutDone) -> None:
        was_parked = self._transfers.holds(message.rid)
        self._transfers.out(message)
        alive = self._residency.swapped_out(message.rid, refused=bool(message.error))
        is_parked = self._transfers.holds(message.rid)
        if is_parked and not alive:
            self._drop_payload(message.rid)
        elif is_parked and not was_parked:
            self._parked(message.rid)

    def _on_swap_in_done(self, message: SwapInDone) -> None:
        lost = bool(message.error)
        alive = self._residency.swapped_in(message.rid, failed=lost)
        self._transfers.back(message, alive)
        if not alive:
            return
        if lost:
            self.counters.requests_recomputed_total += 1
        else:
            self.counters.requests_resumed_total += 1
            self._news.unparked(message.rid)

    # --- a turn -----------------------------------------------------------------------------------------------

    def work(self) -> bool:
        if self._chunk_out and not self._overlap:
            return False
        moves = self._residency.moves()
        self._carry_out(moves)
        step = self._residency.step()
        self._copy_shared(step.copies)
        self._pace.steps(bool(step.rows))
        self._carry_out(step.moves)
        if step.rows:
            self._decode(step.rows)
        if not self._chunk_out:
            self._send_chunk()
        if self._waits_for_chunk():
            self._pace.steps(False)
        self._maybe_snapshot()
        if self._draining and not self._residency.entries:
            self._stop_engine()
        again = any(made.recomputed or made.exhausted for made in (moves, step.moves))
        return bool(step.rows or again) and not self._waits_for_chunk()

    def _waits_for_chunk(self) -> bool:
        return self._chunk_out and not self._overlap

    def _decode(self, rids: list[int]) -> None:
        began = monotonic()
        self._transfers.computing()
        spans = []
        for rid in rids:
            self._tables.refresh(rid)
            spans.append(Span(self._requests[rid], self._residency.entries[rid].cached, 1, True))
        outcomes = self._runner.run(spans)
        for rid in rids:
            self._residency.stepped(rid)
            self._tables.register_filled(rid)
            self._residency.let_past(rid)
        self.counters.decoded(sum(span.start + span.count for span in spans), monotonic() - began)
        self.progress += 1
        self._deliver(outcomes)

    def _send_chunk(self) -> None:
        chunks = self._residency.chunk()
        if not chunks:
            return
        for chunk in chunks:
            self._tables.refresh(chunk.rid)
        self._chunk_out = True
        self._transfers.computing()
        items = [ChunkItem(c.rid, c.start, c.count, c.last, c.forks) for c in chunks]
        self.send("prefill", PrefillChunk(items=items))

    def _copy_shared(self, copies: list[OwnCopy]) -> None:
        """Before anybody is told of the new blocks. A swap out that reads a shared one meanwhile is not disturbed."""
        if not copies:
            return
        for copy in copies:
            self._tables.outdated(copy.rid)
        self._runner.copy_blocks(self._pool.data, [(copy.source, copy.destination) for copy in copies])
        self.counters.kv_copied_blocks_total += len(copies)

    def _carry_out(self, moves: Moves) -> None:
        if moves.swap_out:
            moving = self._residency.moving(moves.swap_out)
            self.preemption.decide(self.counters.prefill_tokens, self.counters.prefill_seconds, *moving)
            if self.preemption.chosen == "recompute":
                self._residency.stop_swapping()
        for rid in moves.swap_out:
            self._tables.outdated(rid)
            blocks = self._ledger.rows_at(rid, self._residency.entries[rid].leaving)
            self.send("offload", SwapOut(rid=rid, blocks=blocks))
        for rid in moves.swap_in:
            self._transfers.returning(rid, self._chunk_out)
            blocks = self._ledger.rows_at(rid, self._residency.entries[rid].away)
            self.send("offload", SwapIn(rid=rid, blocks=blocks))
        for rid in moves.admitted:
            self._news.admitted(rid, self._residency.entries[rid])
        for rid in moves.recomputed:
            self.counters.requests_recomputed_total += 1
            if self._transfers.holds(rid):
                self._drop_payload(rid)
            else:
                self._parked(rid)
        for rid in moves.exhausted:
            self.counters.requests_kv_exhausted_total += 1
            self._finish(rid, "kv_exhausted")

    def _parked(self, rid: int) -> None:
        self._tables.outdated(rid)
        self._news.parked(rid)

    # --- results ----------------------------------------------------------------------------------------------

    def _deliver(self, outcomes: list[Outcome]) -> None:
        for end in self._news.tokens(outcomes):
            self._finish(*end)

    def _finish(self, rid: int, reason: str, code: str = "", error: str = "") -> None:
        """The one way a request ends: blocks and payload go back, exactly one Finished goes out."""
        request = self._requests[rid]
        entry = self._residency.entries[rid]
        busy = entry.busy
        state = self._residency.end(rid)
        if state is None:
            return
        if state is State.SWAPPED:
            self._drop_payload(rid)
        self._news.finished(request, End(rid, reason, code, error))
        if not busy:
            del self._requests[rid]

    def _drop_payload(self, rid: int) -> None:
        self._transfers.dropped(rid)
        self._residency.payload_dropped()
        self.send("offload", DropPayload(rid=rid))

    # --- what others see --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        return {
            **engine_stats(self.counters, self._residency, self._runner.executor),
            "preemption": self.preemption.as_dict(),
            "cpu_offload_bytes": self._transfers.bytes,
            "progress": self.progress,
        }

    def pulse(self) -> tuple[bool, int]:
        """Requests are work as long as it is its turn to do something for them."""
        waits = self._waits and (self._waits_for_chunk() or not self._residency.entries)
        return not waits, self.progress

    def poll_timeout_ms(self) -> int:
        return int(SNAPSHOT_SECONDS * 1000)

    def _maybe_snapshot(self) -> None:
        now = monotonic()
        if now - self._last_snapshot >= SNAPSHOT_SECONDS:
            self._last_snapshot = now
            self.send("admission", Snapshot(stats=self.stats()))

    def _stop_engine(self) -> None:
        self.send("admission", Snapshot(stats=self.stats()))
        self.send("prefill", Halt())
        self.send("offload", Halt())
        self.send("admission", EngineStopped())
        self.halt()
