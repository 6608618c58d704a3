"""Compiles what a start of a model calls for into the cache on disk, for another process to load. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from deepinfer.kernels.codecs import Codec
from deepinfer.kernels.cpu import amx, file_rows
from deepinfer.kernels.cpu.activation_forms import A_BF16, CHUNK
from deepinfer.kernels.cpu.jit import hold_cache
from deepinfer.kernels.cpu.output_norms import output_norm_units
from deepinfer.kernels.cpu.packed_matmul import form_for, packed_units
from deepinfer.kernels.cpu.paged_kernel import attention_units
from deepinfer.kernels.cpu.records import P_BF16, P_INT4, P_INT8
from deepinfer.kernels.cpu.rows import argmax_unit, gated_unit, row_units

_PACKERS = {
    P_BF16: file_rows.pack_bf16_unit,
    P_INT4: file_rows.pack_int4_unit,
    P_INT8: file_rows.pack_int8_unit,
}


class Matrices(NamedTuple):
    """Weights that one matmul kernel takes, in groups of `CHUNK`."""

    kind: int
    """P_INT4, P_INT8 or P_BF16 of `records`."""
    wide: bool
    out_bf16: bool


class Needs(NamedTuple):
    """What a model calls for. What is foretold wrongly costs the time of an idle core, and nothing else."""

    activations: Codec
    k: Codec
    v: Codec
    head_dim: int
    group: int
    """Query heads of a KV head."""
    soft_cap: float
    gelu: bool
    output_norms: bool
    int8_activations: bool
    from_files: bool
    """Whether rows of files are packed as they lie."""
    matrices: tuple[Matrices, ...]


def compile_ahead(needs: Needs) -> None:
    """In an order that leaves what packs and multiplies weights to whoever loads them meanwhile: it begins with that,
    and has to wait where both want the same. Attention is half of all, and is never divided between two processes: its
    units share helpers, which both would compile. Importing this has compiled what runs tasks."""
    hold_cache()
    by_tiles = amx.available()
    model = needs.activations, needs.head_dim, False, needs.soft_cap, needs.group, by_tiles
    attention_units(needs.k, needs.v, *model)
    argmax_unit()
    gated_unit(needs.activations, needs.gelu)
    row_units(needs.activations)
    if needs.output_norms:
        output_norm_units(needs.activations)
    for kind, wide, out_bf16 in reversed(needs.matrices):
        form = form_for(kind, needs.int8_activations and kind == P_INT4)
        packed_units(kind, form, CHUNK, wide, out_bf16, by_tiles and form == A_BF16)
    if needs.from_files:
        for kind in sorted({matrices.kind for matrices in needs.matrices}):
            _PACKERS[kind]()
