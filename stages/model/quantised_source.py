"""The tensors of a quantised Hugging Face folder: matrices put together of their parts, all others as stored."""

from __future__ import annotations

import logging
from collections.abc import Container
from pathlib import Path

import torch

from deepinfer.kernels.stored_rows import StoredRows
from deepinfer.kernels.stored_words import StoredWords
from deepinfer.stages.model.awq import AwqPacking
from deepinfer.stages.model.errors import CheckpointError, UnsupportedModelError
from deepinfer.stages.model.gguf_codes import Int8Groups
from deepinfer.stages.model.gptq import GptqPacking
from deepinfer.stages.model.int4 import Int4Groups, kernel_group
from deepinfer.stages.model.int4_matrix import Int4Matrix, column_order, int8_groups, usable_group
from deepinfer.stages.model.pack_quantized import PackQuantized
from deepinfer.stages.model.packing import Layout, Packing, Parts
from deepinfer.stages.model.precision import is_packed, is_table
from deepinfer.stages.model.quantisation import AWQ, GPTQ, Scheme
from deepinfer.stages.model.safetensors_source import FLOAT_DTYPES, INTEGER_DTYPES, SafetensorsSource
from deepinfer.stages.model.source import TensorHeader

logger = logging.getLogger(__name__)


class QuantisedSource:
    """`prefix.weight` stands for the parts of a matrix, of whatever method. Matrices whose groups the kernels do not
    have (of no multiple of 32 columns) offer no codes and are dequantised.

    Args:
        parameters: names that the model has; a bias of zeros that it has not, as some GPTQ files carry, is dropped.

    Raises CheckpointError for parts that are missing, doubled or do not fit one another.
    """

    def __init__(self, folder: Path, scheme: Scheme, parameters: Container[str]):
        self._folder = folder
        self._raw = SafetensorsSource(folder, FLOAT_DTYPES + INTEGER_DTYPES)
        self._packing = _packing(scheme, Parts(self._raw, scheme, str(folder)))
        first = self._packing.parts[0]
        packed = [name.removesuffix(first) for name in self._raw.headers if name.endswith(first)]
        if not packed:
            raise CheckpointError(f"{folder}: no tensor ends in {first}, yet quantization_config says {scheme.method}")
        self._layouts = {f"{prefix}.weight": self._packing.layout(prefix) for prefix in packed}
        self.headers: dict[str, TensorHeader] = {}
        self._orders: dict[bytes, int] = {}
        for name, layout in self._layouts.items():
            self.headers[name] = self._header(name, layout)
        taken = {prefix + part for prefix in packed for part in self._packing.parts}
        for name, header in self._raw.headers.items():
            if name in taken or self._is_empty_bias(name, parameters):
                continue
            if name in self.headers:
                raise CheckpointError(f"{folder}: tensor {name} is there twice: as it is, and quantised")
            if header.dtype not in FLOAT_DTYPES:
                raise UnsupportedModelError(
                    f"{folder}: tensor {name} has dtype {header.dtype}; supported: {', '.join(FLOAT_DTYPES)}, and "
                    f"integers in the parts of a matrix: {', '.join(self._packing.parts)}"
                )
            self.headers[name] = header
        self._parameters = parameters
        self._log_alone()

    def read(self, name: str) -> torch.Tensor:
        if name not in self._layouts:
            return self._raw.read(name)
        return torch.from_numpy(self._unpack(name).dense())

    def rows(self, name: str) -> StoredRows | None:
        return None if name in self._layouts else self._raw.rows(name)

    def words(self, name: str) -> StoredWords | None:
        group = self.headers[name].group
        return self._unpack(name).stored(group) if group and name in self._layouts else None

    def read_int4(self, name: str) -> Int4Groups | None:
        group = self.headers[name].group
        return self._unpack(name).groups(group) if group else None

    def read_int8(self, name: str) -> Int8Groups | None:
        return int8_groups(self._unpack(name)) if self.headers[name].int8 else None

    def report(self) -> dict[str, object]:
        kept = sum(self._keeps_codes(name) for name in self._layouts)
        counts = {"with_codes": kept, "dequantised": len(self._layouts) - kept}
        return {"quantisation": {**self._packing.report(), **counts}, **self._raw.report()}

    def close(self) -> None:
        self._raw.close()

    def _unpack(self, name: str) -> Int4Matrix:
        return self._packing.unpack(name.removesuffix(".weight"), self._layouts[name])

    def _header(self, name: str, layout: Layout) -> TensorHeader:
        prefix = name.removesuffix(".weight")
        parts = [self._raw.headers.get(prefix + part) for part in self._packing.parts]
        nbytes = sum(part.nbytes for part in parts if part is not None)
        group = usable_group(layout.group, layout.group_of)
        order = column_order(layout.group_of)
        if layout.bits == 8:
            return self._int8_header(name, layout, nbytes, group > 0 and order is None)
        if not group:
            logger.warning(
                "%s: %s has groups that the kernels do not have (%s): it is dequantised, to 16 bits a weight in bf16",
                self._folder, name, _why(layout),
            )  # fmt: skip
        half_scales = any(part is not None and part.dtype == "F16" and len(part.shape) == 2 for part in parts)
        wide = layout.has_zeros or not half_scales
        number = 0 if order is None else self._orders.setdefault(order.tobytes(), len(self._orders) + 1)
        shape = layout.rows, layout.columns
        return TensorHeader(shape, f"{self._packing.type_name} int4", nbytes, group, wide, number)

    def _int8_header(self, name: str, layout: Layout, nbytes: int, has_group: bool) -> TensorHeader:
        int8 = has_group and not layout.has_zeros
        if not int8 or not is_table(name):
            logger.warning(
                "%s: %s has 8-bit codes, which are kept for embedding and head in symmetric groups of a multiple of 32 "
                "only: it is dequantised, to 16 bits a weight in bf16",
                self._folder, name,
            )  # fmt: skip
        shape = layout.rows, layout.columns
        return TensorHeader(shape, f"{self._packing.type_name} int8", nbytes, int8=int8)

    def _keeps_codes(self, name: str) -> bool:
        if self.headers[name].int8:
            return is_table(name)
        return is_packed(name, self.headers) and name in self._parameters

    def _log_alone(self) -> None:
        """Matrices that have codes and lose them."""
        for name in self._layouts:
            if self.headers[name].group and not self._keeps_codes(name):
                logger.warning(
                    "%s: %s is dequantised, to 16 bits a weight in bf16: %s", self._folder, name,
                    "of embeddings and of heads that are tied to them no codes are kept" if is_table(name)
                    else "the matrices that it is multiplied with (q, k, v; gate, up) lack codes, have their columns "
                    "in another order, or together no multiple of 16 rows",
                )  # fmt: skip

    def _is_empty_bias(self, name: str, parameters: Container[str]) -> bool:
        is_bias = name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in self._layouts
        if name in parameters or not is_bias:
            return False
        if bool(self._raw.read(name).any()):
            raise CheckpointError(f"{self._folder}: stray tensor {name}: this model has no such bias, and it is not 0")
        return True


def _why(layout: Layout) -> str:
    fits = kernel_group(layout.group, layout.columns) > 0
    return "g_idx names some groups more often" if fits else f"{layout.group} of {layout.columns} columns"


def _packing(scheme: Scheme, parts: Parts) -> Packing:
    if scheme.method == AWQ:
        return AwqPacking(parts)
    if scheme.method == GPTQ:
        return GptqPacking(parts, scheme)
    return PackQuantized(parts, scheme)
