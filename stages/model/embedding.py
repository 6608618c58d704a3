"""Token embeddings: rows of a table as float32, where the residual stream begins."""

from __future__ import annotations

from typing import Protocol

import torch

from deepinfer.kernels.cpu.tasks import not_recording
from deepinfer.kernels.linear import RowTable
from deepinfer.stages.model.gguf_codes import GROUP, Int8Groups


class Embedding(Protocol):
    kind: str

    @property
    def nbytes(self) -> int: ...

    @property
    def table_bytes(self) -> int:
        """The part of `nbytes` that a tied head shares."""
        ...

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int32 [N], valid ids, on the table's device -> float32 [N, hidden], memory of its own."""
        ...


class DenseEmbedding:
    """table [vocab, hidden], fp32 or bf16."""

    def __init__(self, table: torch.Tensor):
        self._table = table
        self.kind = "dense bf16" if table.dtype == torch.bfloat16 else "dense fp32"

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    @property
    def table_bytes(self) -> int:
        return self._table.nbytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.embedding(self._table, token_ids).float()


class HeadEmbedding:
    """A tied embedding that reads the rows of its head."""

    nbytes = table_bytes = 0

    def __init__(self, head: RowTable):
        self._head = head
        self.kind = "rows of the head"

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._head.rows(token_ids)


class Int8Embedding:
    """The codes and scales of a Q8_0 table; only the rows that are asked for become floats."""

    kind = "int8 groups"

    def __init__(self, groups: Int8Groups, device: str = "cpu"):
        self._codes = torch.from_numpy(groups.codes).to(device)
        self._scales = torch.from_numpy(groups.scales).to(device)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes

    @property
    def table_bytes(self) -> int:
        return 0

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = self._codes[token_ids].float().unflatten(1, (-1, GROUP))
        return (rows * self._scales[token_ids].float().unsqueeze(-1)).flatten(1)


class ScaledEmbedding:
    """The rows of another embedding times a number, in float32 (Gemma)."""

    def __init__(self, inner: Embedding, scale: float):
        self._inner, self._scale = inner, scale
        self.kind = inner.kind

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    @property
    def table_bytes(self) -> int:
        return self._inner.table_bytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        # Recorded tasks would leave out what follows them here.
        with not_recording():
            return self._inner(token_ids).mul_(self._scale)
