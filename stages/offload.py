"""The offload stage: moves blocks of requests between the pool and host memory, as bytes."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import zmq

from deepinfer.stages.memory.arena import Copy, HostArena
from deepinfer.stages.messages import CopyMeasured, DropPayload, SwapIn, SwapInDone, SwapOut, SwapOutDone
from deepinfer.stages.pace import Pace
from deepinfer.stages.stage import Stage, monotonic

MEASURED_BYTES = 8 << 20
MEASURED_SECONDS = 0.002
"""A measurement copies so many bytes at a time, at least for so long in each direction."""

CopyRows = Callable[[torch.Tensor, torch.Tensor], object]
"""(destination, source), both uint8 [rows, row_bytes]."""


def copy_rows(destination: torch.Tensor, source: torch.Tensor) -> None:
    """On the CPU by numpy, which copies in the calling thread: torch would start a team of OpenMP workers for it, and a
    second team slows every decode step (see `stages.compute`)."""
    if destination.device.type == source.device.type == "cpu":
        np.copyto(destination.numpy(), source.numpy())
    else:
        destination.copy_(source)


class OffloadStage(Stage):
    """Owns the arena and the payloads. Touches pool rows only between a SwapOut or SwapIn and its answer.

    The order of a swap out: take host rows (this is the byte budget), copy, answer. Decode frees the blocks when it has
    the answer, never before: the allocator would hand out memory that is still being read.
    """

    name = "offload"

    def __init__(
        self,
        context: zmq.Context,
        inbox: str,
        outboxes: Mapping[str, str],
        pool: torch.Tensor,
        arena: HostArena,
        pace: Pace,
        copy: CopyRows = copy_rows,
        verify: bool = False,
        measure: bool = False,
    ) -> None:
        super().__init__(context, inbox, outboxes)
        self._pool = pool
        self._arena = arena
        self._pace = pace
        self._copy = copy
        self._verify = verify
        """Compute a checksum of each pool row before it is copied, and compare it when the row is back."""
        self._measure = measure
        """Tell decode at start how fast copies are."""
        self._payloads: dict[int, list[int]] = {}
        self._checksums: dict[int, list[int]] = {}
        self.on(SwapOut, self._on_swap_out)
        self.on(SwapIn, self._on_swap_in)
        self.on(DropPayload, self._on_drop)

    def opened(self) -> None:
        """No request holds a block yet, so any pool row may be read, and written with what was read from it."""
        if not self._measure:
            return
        rows = min(len(self._pool), self._arena.rows_per_piece, self._arena.num_rows)
        rows = min(rows, max(1, MEASURED_BYTES // self._arena.row_bytes))
        pool, host = self._pool[:rows], self._arena.view(Copy(0, 0, rows))
        try:
            self.send("decode", self._measured(host, pool))
        except (RuntimeError, OSError) as error:
            self.send("decode", CopyMeasured(error=str(error)))

    def _measured(self, host: torch.Tensor, pool: torch.Tensor) -> CopyMeasured:
        self._copy(host, pool)  # The first touch of a host page is not what later copies cost.
        count, out_seconds, in_seconds = 0, 0.0, 0.0
        while min(out_seconds, in_seconds) < MEASURED_SECONDS:
            began = monotonic()
            self._copy(host, pool)
            middle = monotonic()
            self._copy(pool, host)
            count += 1
            out_seconds += middle - began
            in_seconds += monotonic() - middle
        return CopyMeasured(bytes=count * pool.numel(), out_seconds=out_seconds, in_seconds=in_seconds)

    def _on_swap_out(self, message: SwapOut) -> None:
        began = monotonic()
        rows = self._arena.take(len(message.blocks))
        if rows is None:
            self.send("decode", self._rejection(message))
            return
        try:
            copies = self._arena.plan(message.blocks, rows)
            self._carry(copies, back=False)
        except (RuntimeError, OSError) as error:
            self._arena.give_back(rows)
            self.send("decode", SwapOutDone(rid=message.rid, error=f"copy to the host failed: {error}"))
            return
        self._payloads.setdefault(message.rid, []).extend(rows)
        if self._verify:
            self._checksums.setdefault(message.rid, []).extend(self._row_checksums(message.blocks))
        self.send(
            "decode",
            SwapOutDone(
                rid=message.rid,
                bytes=len(rows) * self._arena.row_bytes,
                copies=len(copies),
                seconds=monotonic() - began,
            ),
        )

    def _rejection(self, message: SwapOut) -> SwapOutDone:
        need = len(message.blocks) * self._arena.row_bytes
        left = self._arena.free_rows * self._arena.row_bytes
        return SwapOutDone(
            rid=message.rid,
            error=f"needs {need} bytes on the host, {left} of the budget are left",
            rejected=True,
        )

    def _on_swap_in(self, message: SwapIn) -> None:
        began = monotonic()
        rows = self._payloads[message.rid]
        error = ""
        copies = self._arena.plan(message.blocks, rows)
        try:
            self._carry(copies, back=True)
        except (RuntimeError, OSError) as failure:
            error = f"copy from the host failed: {failure}"
        if self._verify and not error:
            before, after = self._checksums[message.rid], self._row_checksums(message.blocks)
            if before != after:
                error = f"{sum(a != b for a, b in zip(before, after, strict=True))} blocks came back changed"
        self.send(
            "decode",
            SwapInDone(
                rid=message.rid,
                bytes=len(rows) * self._arena.row_bytes,
                copies=len(copies),
                seconds=monotonic() - began,
                error=error,
            ),
        )
        self._drop(message.rid)

    def _carry(self, copies: Sequence[Copy], back: bool) -> None:
        """Out of the pool, or back into it."""
        for whole in copies:
            for first, count in self._pace.slices(whole.count, self._arena.row_bytes):
                part = whole.part(first, count)
                host, pool = self._arena.view(part), self._pool[part.block : part.block + count]
                began = time.thread_time()
                if back:
                    self._copy(pool, host)
                else:
                    self._copy(host, pool)
                self._pace.took(time.thread_time() - began)
                self.progress += 1

    def _row_checksums(self, blocks: list[int]) -> list[int]:
        return [zlib.crc32(self._pool[block].cpu().numpy().data) for block in blocks]

    def _on_drop(self, message: DropPayload) -> None:
        self._drop(message.rid)

    def _drop(self, rid: int) -> None:
        self._checksums.pop(rid, None)
        rows = self._payloads.pop(rid, None)
        if rows is not None:
            self._arena.give_back(rows)
