"""Captured decode steps: what a device that has graphs offers. The CPU has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from deepinfer.kernels.attention_batch import AttentionBatch


class Graph(Protocol):
    """Device work that was captured once."""

    def replay(self) -> None:
        """Do it again, after everything that was started before, with what its memory holds then."""
        ...


class StepBuffers(Protocol):
    """The inputs of a decode step, in the same device memory in every step."""

    token_ids: Tensor
    """int32 [rows], on the device."""
    attention: AttentionBatch
    """As many rows, each a sequence of its own; those that a step does not use are padding, which touches nothing."""

    def fill(self, token_ids: Tensor, batch: AttentionBatch) -> None:
        """The inputs of the next step: `token_ids` int32 [n] on the host, `batch` with n rows, one for each sequence.

        The results of the step before have arrived on the host: what this copies from is written anew.

        Raises ValueError if they do not fit, or if a row would read or write where it must not.
        """
        ...


class StepCapture(Protocol):
    """Makes what a captured step consists of."""

    def buffers(self, rows: int, context: int) -> StepBuffers:
        """For up to `rows` rows with contexts of up to `context` tokens."""
        ...

    def capture(self, function: Callable[[], None]) -> Graph:
        """See `kernels.cuda.launcher.Backend.capture`."""
        ...
