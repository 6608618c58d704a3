"""Checkpoint -> Model: fused linear forms (q, k, v in one; gate, up in one), 4-bit codes kept as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from deepinfer.kernels.linear import Linear, RowTable
from deepinfer.kernels.ops import CpuOps, Ops
from deepinfer.kernels.packing import gathered
from deepinfer.kernels.stored_rows import NotFiniteError, StoredRows
from deepinfer.kernels.stored_words import StoredWords
from deepinfer.stages.heap import trim_heap
from deepinfer.stages.model.checkpoint import Checkpoint
from deepinfer.stages.model.config import EMBEDDING, HEAD
from deepinfer.stages.model.embedding import DenseEmbedding, Embedding, HeadEmbedding, Int8Embedding, ScaledEmbedding
from deepinfer.stages.model.errors import CheckpointError
from deepinfer.stages.model.gguf_codes import Int8Groups
from deepinfer.stages.model.int4 import Int4Groups
from deepinfer.stages.model.key_bias import INLINE, KeyBias, KeyBiasRule, log_choices, sample_keys
from deepinfer.stages.model.model import TORCH_DTYPES, Layer, Model
from deepinfer.stages.model.precision import choose_dtype, is_packed, prefills_in_bf16
from deepinfer.stages.model.rope import row_order
from deepinfer.stages.model.weights import Progress, WeightReader, no_progress

Rows = torch.Tensor | Int4Groups | StoredRows
Weights = Rows | StoredWords
"""Of one linear form: as its kernels take them, or where they lie."""


def load_model(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    batch_invariant: bool = False,
    w4_prefill: str = "auto",
    progress: Progress = no_progress,
    key_bias: KeyBiasRule = INLINE,
    ops: Ops | None = None,
) -> Model:
    """Reads every tensor once and closes the checkpoint.

    `dtype`: auto, fp32 or bf16. `w4_prefill`: see `precision.prefills_in_bf16`. `key_bias` decides
    which layers leave their key bias to the attention. `ops`: the device, the CPU by default. Raises CheckpointError
    for non-finite values and for a stored head that contradicts tie_word_embeddings.
    """
    bf16_prefill = prefills_in_bf16(w4_prefill)
    compute_dtype = choose_dtype(dtype, checkpoint.source.headers)
    reader = WeightReader(checkpoint, TORCH_DTYPES[compute_dtype], progress)
    try:
        build = _Builder(reader, checkpoint, batch_invariant, bf16_prefill, key_bias, ops or CpuOps())
        with torch.inference_mode(), _one_torch_thread(), gathered():
            model = build.model(compute_dtype)
            reader.finish()
    except NotFiniteError as error:
        raise CheckpointError(str(error)) from error
    finally:
        checkpoint.source.close()
        trim_heap()
    return model


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Torch's threads and those of the compiled kernels would wait for one another at every small step: a model of
    490 MB was seen to take 5.3 s so, and 1.4 s like this, while other programs used the cores as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Builder:
    def __init__(
        self,
        reader: WeightReader,
        checkpoint: Checkpoint,
        batch_invariant: bool,
        bf16_prefill: bool,
        key_bias: KeyBiasRule,
        ops: Ops,
    ):
        self._reader, self._config = reader, checkpoint.config
        self._path, self._headers = checkpoint.path, checkpoint.source.headers
        self._files = checkpoint.describe()
        self._batch_invariant, self._bf16_prefill = batch_invariant, bf16_prefill
        self._key_bias, self._ops = key_bias, ops
        self._as_stored = reader.dtype == torch.bfloat16 and ops.packs_stored

    def model(self, compute_dtype: str) -> Model:
        tied = self._config.tie_word_embeddings
        table = self._table(EMBEDDING, is_head=tied)
        layers = tuple(self._layer(layer) for layer in range(self._config.num_layers))
        final_norm = self._norm("model.norm.weight")
        if tied and self._reader.has(HEAD) and not self._reader.same_as(HEAD, EMBEDDING):
            raise CheckpointError(
                f"{self._path}: tie_word_embeddings is true, yet {HEAD} differs from {EMBEDDING}; "
                "one of the two is wrong"
            )
        if isinstance(table, torch.Tensor):
            table = table.to(self._ops.device)  # Once: a tied head that is dense shares it.
        trim_heap()  # What the layers left: embedding and head are the largest.
        head = self._head(table) if tied else self._own_head()
        embedding = HeadEmbedding(head) if tied and isinstance(head, RowTable) else self._embedding(table)
        if self._config.embedding_scale != 1:
            embedding = ScaledEmbedding(embedding, self._config.embedding_scale)
        mode = self._key_bias.mode
        log_choices(mode, self._config, [layer.key_bias for layer in layers])
        return Model(
            self._config, compute_dtype, embedding, layers, final_norm, head, tied, mode, self._ops, self._files
        )

    def _embedding(self, table: Int8Groups | StoredRows | torch.Tensor) -> Embedding:
        if isinstance(table, Int8Groups):
            return Int8Embedding(table, self._ops.device)
        return DenseEmbedding(table.dense(self._reader.dtype) if isinstance(table, StoredRows) else table)

    def _norm(self, name: str) -> torch.Tensor:
        return self._vector_of_norm(name).to(self._ops.device)

    def _vector_of_norm(self, name: str) -> torch.Tensor:
        weight, offset = self._reader.vector(name), self._config.norm_offset
        return weight + offset if offset else weight

    def _table(self, name: str, is_head: bool) -> Int8Groups | StoredRows | torch.Tensor:
        """Of embedding or head: 8-bit codes as they are in bf16 compute, else dense. What becomes a head is not read
        before it is packed."""
        rows = self._rows([name]) if is_head else None
        if rows is not None:
            return rows._replace(bits=8) if self._headers[name].int8 else rows
        groups = self._reader.int8(name) if self._reader.dtype == torch.bfloat16 else None
        return self._reader.matrix([name]) if groups is None else groups

    def _own_head(self) -> Linear:
        """Of a model that does not tie it. 4-bit codes are multiplied as they are for any row count, without a
        copy, so that logits are not rounded to bf16."""
        if self._reader.dtype == torch.bfloat16 and is_packed(HEAD, self._headers):
            return self._form(self._weights([HEAD.removesuffix(".weight")]), None, torch.float32, True)
        return self._head(self._table(HEAD, is_head=True))

    def _head(self, table: Int8Groups | StoredRows | torch.Tensor) -> Linear:
        """Gives float32: logits rounded to bf16 would cost as much as all other rounding together."""
        if isinstance(table, StoredRows):
            return self._ops.stored(table, None, self._batch_invariant, self._bf16_prefill, torch.float32)
        if isinstance(table, torch.Tensor):
            return self._ops.dense(table, None, self._batch_invariant, torch.float32)
        scales = torch.from_numpy(table.scales).float()
        return self._ops.w8a16(torch.from_numpy(table.codes), scales, torch.float32)

    def _layer(self, layer: int) -> Layer:
        config = self._config
        prefix = f"model.layers.{layer}"
        o, down = f"{prefix}.self_attn.o_proj", f"{prefix}.mlp.down_proj"
        gate_up = ["gate_up"] if config.fused_projections else ["gate", "up"]
        qk_norm = None
        if config.qk_norm:
            q_norm, k_norm = (self._vector_of_norm(f"{prefix}.self_attn.{part}_norm.weight") for part in "qk")
            whole = config.qk_norm == "projection"
            qk_norm = (q_norm.to(self._ops.device), k_norm.to(self._ops.device)) if whole else (q_norm, k_norm)
        norms = {place: self._norm(f"{prefix}.{name}.weight") for place, name in config.norm_names.items()}
        qkv, key_bias = self._qkv(layer, norms.get("input"))
        return Layer(
            input_norm=norms.get("input"),
            qkv=qkv,
            o=self._linear([o], config.o_bias),
            mlp_norm=norms.get("mlp"),
            gate_up=self._linear([f"{prefix}.mlp.{part}_proj" for part in gate_up], config.mlp_bias),
            down=self._linear([down], config.mlp_bias),
            qk_norm=qk_norm,
            key_bias=key_bias,
            attention_out_norm=norms.get("attention_out"),
            mlp_out_norm=norms.get("mlp_out"),
        )

    def _qkv(self, layer: int, input_norm: torch.Tensor | None) -> tuple[Linear, KeyBias | None]:
        """The fused form. It does not add a key bias that is split. A k norm, keys that are not rotated and inputs that
        are not normalised keep theirs."""
        config = self._config
        parts = ["qkv"] if config.fused_projections else ["q", "k", "v"]
        names = [f"model.layers.{layer}.self_attn.{part}_proj" for part in parts]
        order = row_order(config)
        if order is None and not config.qkv_bias:
            return self._form(self._weights(names), None), None
        weights = self._rows_of(names)
        if order is not None:
            weights = _permuted(weights, order)
        if not config.qkv_bias:
            return self._form(weights, None), None
        bias = self._bias(names)
        if order is not None:
            bias = bias[torch.from_numpy(order)]
        q_bias, k_bias, v_bias = bias.split([config.q_size, config.kv_size, config.kv_size])
        decided = None
        if not config.qk_norm and config.rope_of(layer) is not None and input_norm is not None:
            keys = sample_keys(self._key_rows(weights), input_norm.cpu())
            decided = self._key_bias.choose(k_bias, keys, config.head_dim, self._reader.dtype)
            if decided.split:
                k_bias = torch.zeros_like(k_bias)
        return self._form(weights, torch.cat((q_bias, k_bias, v_bias)).to(self._reader.dtype)), decided

    def _key_rows(self, weights: Rows) -> torch.Tensor:
        """float32 [kv_size, hidden] of fused q, k and v."""
        rows = np.arange(self._config.q_size, self._config.q_size + self._config.kv_size)
        keys = _permuted(weights, rows)
        if isinstance(keys, torch.Tensor):
            return keys.float()
        return (
            torch.from_numpy(keys.dense()) if isinstance(keys, Int4Groups) else keys.dense(self._reader.dtype).float()
        )

    def _linear(self, names: Sequence[str], has_bias: bool) -> Linear:
        bias = self._bias(names).to(self._reader.dtype) if has_bias else None
        return self._form(self._weights(names), bias)

    def _bias(self, names: Sequence[str]) -> torch.Tensor:
        """float32."""
        return torch.cat([self._reader.vector(f"{name}.bias") for name in names])

    def _rows(self, weights: Sequence[str]) -> StoredRows | None:
        return self._reader.rows(weights) if self._as_stored else None

    def _rows_of(self, names: Sequence[str]) -> Rows:
        """Of which some may be chosen."""
        weights = [f"{name}.weight" for name in names]
        rows = self._rows(weights)
        if rows is not None:
            return rows._replace(bits=4) if is_packed(weights[0], self._headers) else rows
        if self._reader.dtype != torch.bfloat16 or not is_packed(weights[0], self._headers):
            return self._reader.matrix(weights)
        return self._reader.int4(weights)

    def _weights(self, names: Sequence[str]) -> Weights:
        weights = [f"{name}.weight" for name in names]
        words = self._reader.words(weights) if self._as_stored and is_packed(weights[0], self._headers) else None
        return self._rows_of(names) if words is None else words

    def _form(
        self,
        weights: Weights,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
        batch_invariant: bool | None = None,
    ) -> Linear:
        """`batch_invariant`: that of the model, by default."""
        batch_invariant = self._batch_invariant if batch_invariant is None else batch_invariant
        if isinstance(weights, StoredRows | StoredWords):
            linear = self._ops.stored(weights, bias, batch_invariant, self._bf16_prefill, out_dtype)
            return self._in_order(linear, weights.order if isinstance(weights, StoredWords) else None)
        if isinstance(weights, torch.Tensor):
            return self._ops.dense(weights, bias, batch_invariant, out_dtype)
        linear = self._ops.w4a16(
            torch.from_numpy(weights.codes),
            torch.from_numpy(weights.scales),
            torch.from_numpy(weights.minima),
            bias,
            weights.group,
            batch_invariant,
            self._bf16_prefill,
            out_dtype,
        )
        return self._in_order(linear, weights.order)

    def _in_order(self, linear: Linear, order: np.ndarray | None) -> Linear:
        return linear if order is None else self._ops.reordered(linear, torch.from_numpy(order))


def _permuted(weights: Rows, rows: np.ndarray) -> Rows:
    return weights[torch.from_numpy(rows)] if isinstance(weights, torch.Tensor) else weights.permuted(rows)
