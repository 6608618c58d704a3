"""Runs a model over a batch of rows. One executor per thread: the model is shared, the buffers are not."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepinfer.kernels.attention import AttentionBatch, PagedAttention
from deepinfer.kernels.cpu.step_programs import StepPrograms
from deepinfer.stages.model.config import GELU_TANH
from deepinfer.stages.model.model import Layer, Model
from deepinfer.stages.model.step_graphs import StepGraphs

KEPT_ROWS = 64


class ForwardBatch(NamedTuple):
    token_ids: torch.Tensor
    """int32 [N], valid ids."""
    attention: AttentionBatch
    """Positions and block tables of the same N rows."""
    logits_rows: torch.Tensor
    """int64 [R], the rows whose logits are wanted; may be empty."""


class _Buffers(NamedTuple):
    normed: torch.Tensor
    attended: torch.Tensor
    activated: torch.Tensor


class Executor:
    """The residual stream is float32; everything else is in the model's compute dtype.

    With `graphs` or `programs`, decode steps are captured or recorded, and replayed; everything else is computed as it
    comes. Buffers for up to
    `kept_rows` rows are kept from one pass to the next.
    """

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        graphs: StepGraphs | None = None,
        kept_rows: int = KEPT_ROWS,
        programs: StepPrograms | None = None,
    ):
        self._model, self.attention, self._kept_rows = model, attention, kept_rows
        self.graphs, self.programs = graphs, programs
        self._buffers: dict[int, _Buffers] = {}
        self._gate = model.ops.gelu_mul if model.config.activation == GELU_TANH else model.ops.silu_mul
        self.progress = 0
        """Layers that have begun: moves also within a long prefill chunk."""

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 logits [R, vocab] on the model's device, valid until the next call. K and V of all N rows are in the
        pool afterwards.

        `batch.attention.nonfinite_rows` (bool [N]) then marks rows whose K or V was NaN or infinite: their
        requests must end. The pool holds zeros in those places, so nobody else is touched. Non-finite
        logits are the sampler's to report.
        """
        wanted = batch.logits_rows
        if self.graphs is not None and self.graphs.takes(batch.attention, len(wanted)):
            return self.graphs.run(batch.token_ids, batch.attention, self._compute)
        if self.programs is not None and self.programs.takes(batch.attention, len(wanted)):
            self.progress += 1
            return self.programs.run(batch.token_ids, batch.attention, self._compute)
        device = self._model.ops.device
        return self._compute(batch.token_ids.to(device), batch.attention, wanted.to(device))

    def _compute(
        self, token_ids: torch.Tensor, attention: AttentionBatch, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of the rows `wanted`, or of all. Tensors are on the device. If `attention` has its device buffers,
        nothing here waits for the device or copies to or from the host, so that it can be captured."""
        model, ops, eps = self._model, self._model.ops, self._model.config.rms_norm_eps
        normed, attended, activated = self._buffers_for(token_ids.shape[0])
        residual = ops.embed(model.embedding, token_ids)
        first = model.layers[0].input_norm
        if first is None:
            ops.narrow(residual, normed)
        else:
            ops.rms_norm(residual, first, eps, normed)
        last = len(model.layers) - 1
        for index, layer in enumerate(model.layers):
            self.progress += 1
            self.attention.forward(index, self._qkv(layer, normed), attention, attended)
            self._add(residual, layer.o(attended), layer.attention_out_norm, layer.mlp_norm, normed)
            self._gate(layer.gate_up(normed), activated)
            delta = layer.down(activated)
            if index < last:
                self._add(residual, delta, layer.mlp_out_norm, model.layers[index + 1].input_norm, normed)
        return self._logits(residual, delta, wanted)

    def _qkv(self, layer: Layer, normed: torch.Tensor) -> torch.Tensor:
        qkv = layer.qkv(normed)
        if layer.qk_norm is not None and self._model.config.qk_norm == "projection":
            self._model.ops.projection_norm(qkv, *layer.qk_norm, self._model.config.rms_norm_eps)
        return qkv

    def _add(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor,
        delta_norm: torch.Tensor | None,
        norm: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Add `delta` to the residual stream, normalised if there is a norm for it; out: what the next matmul gets."""
        ops, eps = self._model.ops, self._model.config.rms_norm_eps
        if delta_norm is None and norm is not None:
            ops.add_rms_norm(residual, delta, norm, eps, out)
        elif delta_norm is not None:
            ops.add_normed(residual, delta, delta_norm, norm, eps, out)
        else:
            raise ValueError("a layer has norms before its matmuls, after them, or both")

    def _logits(self, residual: torch.Tensor, delta: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
        ops = self._model.ops
        if wanted is not None:
            if wanted.shape[0] == 0:
                return torch.empty(0, self._model.config.vocab_size)
            residual, delta = residual[wanted], delta[wanted]
        normed = torch.empty_like(delta)
        self._add(residual, delta, self._model.layers[-1].mlp_out_norm, self._model.final_norm, normed)
        logits = self._model.head(normed)
        if self._model.config.logit_soft_cap:
            ops.soft_cap(logits, self._model.config.logit_soft_cap)
        return logits

    def _buffers_for(self, rows: int) -> _Buffers:
        """Decode repeats a few row counts: their buffers are kept. Larger ones (prefill) are made afresh."""
        found = self._buffers.get(rows)
        if found is not None:
            return found
        config, dtype, device = self._model.config, self._model.torch_dtype, self._model.ops.device
        widths = config.hidden_size, config.q_size, config.intermediate_size
        made = _Buffers(*(torch.empty(rows, width, dtype=dtype, device=device) for width in widths))
        if rows <= self._kept_rows:
            self._buffers[rows] = made
        return made
