"""What becomes of every tensor of a source: which matrices get codes, in which groups, and which stay as they are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.daemon.quantize.config import GROUP_SIZES, Quantize
from deepinfer.daemon.quantize.shards import TensorPlan, Tensors
from deepinfer.stages.model.config import EMBEDDING, HEAD
from deepinfer.stages.model.source import TensorHeader

_LINEAR = re.compile(r"(.*layers\.\d+\.(.*_proj))\.weight")
_HEAD_KIND = HEAD.removesuffix(".weight")
"""Named in any case: in vLLM a head is no linear layer."""
_HEAD_BITS = {"int8": 8, "w4": 4}


@dataclass(frozen=True)
class Matrix:
    """A matrix that gets codes."""

    name: str
    """As the result calls it, with `.weight`."""
    source: str
    """The tensor of the source: that of the embedding for a tied head."""
    shape: tuple[int, int]
    bits: int
    group: int
    symmetric: bool
    scale_dtype: str

    @property
    def prefix(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def kind(self) -> str:
        """`self_attn.q_proj` and the like: the same in every layer."""
        match = _LINEAR.fullmatch(self.name)
        return self.prefix if match is None else match[2]

    def tensors(self) -> Tensors:
        rows, columns = self.shape
        groups = columns // self.group
        parts = {
            f"{self.prefix}.weight_packed": TensorPlan("I32", (rows, -(-columns * self.bits // 32))),
            f"{self.prefix}.weight_scale": TensorPlan(self.scale_dtype, (rows, groups)),
            f"{self.prefix}.weight_shape": TensorPlan("I64", (2,)),
        }
        if not self.symmetric:
            zeros = TensorPlan("I32", (-(-rows * self.bits // 32), groups))
            parts[f"{self.prefix}.weight_zero_point"] = zeros
        return parts


@dataclass(frozen=True)
class Plain:
    """A tensor that stays dense, perhaps in another dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def tensors(self) -> Tensors:
        return {self.name: TensorPlan(self.dtype, self.shape)}


@dataclass(frozen=True)
class Plan:
    parts: tuple[Matrix | Plain, ...]
    dtype: str
    """Of everything that is no code: F16 or BF16."""
    unties_head: bool
    left: tuple[str, ...]
    """Matrices that no group divides; they stay in 16 bits."""

    @property
    def matrices(self) -> list[Matrix]:
        return [part for part in self.parts if isinstance(part, Matrix)]

    def quantization_config(self) -> dict[str, Any]:
        """For config.json, as the compressed-tensors package defines it: one group for each way of coding."""
        kinds: dict[tuple[int, int, bool], list[str]] = {}
        for matrix in self.matrices:
            names = kinds.setdefault((matrix.bits, matrix.group, matrix.symmetric), [])
            if matrix.kind not in names:
                names.append(matrix.kind)
        groups: dict[str, Any] = {}
        for number, ((bits, group, symmetric), names) in enumerate(kinds.items()):
            named = names if len(kinds) > 1 else [name for name in names if name == _HEAD_KIND]
            targets = [*(["Linear"] if len(kinds) == 1 else []), *(f"re:.*{re.escape(name)}$" for name in named)]
            groups[f"group_{number}"] = {
                "targets": targets,
                "format": "pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": bits,
                    "type": "int",
                    "strategy": "group",
                    "group_size": group,
                    "symmetric": symmetric,
                    "dynamic": False,
                    "actorder": None,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "block_structure": None,
                },
            }
        has_head = any(matrix.name == HEAD for matrix in self.matrices)
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [*([] if has_head else [_HEAD_KIND]), *(name.removesuffix(".weight") for name in self.left)],
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def make_plan(headers: Mapping[str, TensorHeader], tied: bool, settings: Quantize) -> Plan:
    """`headers` in the order in which the source is best read."""
    matrix_types = {header.dtype for header in headers.values() if len(header.shape) == 2}
    dtype = "F16" if matrix_types == {"F16"} else "BF16"
    wanted = settings.group_size or _common_group(headers, settings.head != "keep")
    parts: list[Matrix | Plain] = []
    left = []
    for name, header in headers.items():
        group = _group(header.shape, wanted) if _LINEAR.fullmatch(name) else 0
        if _LINEAR.fullmatch(name) and not group:
            left.append(name)
        if group:
            parts.append(Matrix(name, name, _two(header.shape), 4, group, settings.symmetric, dtype))
        elif name != HEAD or settings.head == "keep":
            parts.append(Plain(name, header.shape, dtype))
    if settings.head != "keep":
        source = EMBEDDING if tied else HEAD
        shape = _two(headers[source].shape)
        bits, group = _HEAD_BITS[settings.head], _group(shape, wanted)
        if group:
            symmetric = settings.symmetric or bits == 8
            parts.append(Matrix(HEAD, source, shape, bits, group, symmetric, dtype))
        else:
            left.append(HEAD)
            parts.extend([Plain(HEAD, shape, dtype)] if not tied else [])
    unties = tied and any(isinstance(part, Matrix) and part.name == HEAD for part in parts)
    return Plan(tuple(parts), dtype, unties, tuple(left))


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return rows, columns


def _common_group(headers: Mapping[str, TensorHeader], with_head: bool) -> int:
    """One size for all matrices that get codes, because what transformers makes of packed zero points knows only one.
    The head has the columns of the embedding."""
    shapes = [header.shape for name, header in headers.items() if _LINEAR.fullmatch(name)]
    shapes += [headers[EMBEDDING].shape] if with_head else []
    return min((group for shape in shapes if (group := _group(shape, GROUP_SIZES[0]))), default=GROUP_SIZES[0])


def _group(shape: tuple[int, ...], wanted: int) -> int:
    """The largest of the sizes up to `wanted` that divides the columns, 0 if none does."""
    fits = [size for size in GROUP_SIZES if size <= wanted and shape[-1] % size == 0]
    return fits[0] if fits else 0


def codes_per_weight(plan: Plan) -> float:
    """Bits that a weight of the coded matrices takes, scales and zero points included."""
    nbytes = sum(tensor.nbytes for matrix in plan.matrices for tensor in matrix.tensors().values())
    return 8 * nbytes / sum(math.prod(matrix.shape) for matrix in plan.matrices)
