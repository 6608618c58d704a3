"""What `quantization_config` of a Hugging Face folder asks for: a scheme that loads, or a refusal by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.stages.model.errors import CheckpointError, UnsupportedModelError
from deepinfer.stages.model.folder_names import AWQ_CONFIG, CONFIG, GPTQ_CONFIG
from deepinfer.stages.model.json_fields import read_json

AWQ, GPTQ, COMPRESSED = "awq", "gptq", "compressed-tensors"
SUPPORTED = (
    "awq with 4 bits (version gemm), gptq with 4 bits (checkpoint_format gptq, gptq_v2), compressed-tensors with 4- or "
    "8-bit integer weights and 16-bit activations (format pack-quantized), unquantised float32, float16 and bfloat16, "
    "or a GGUF file"
)
_BESIDE = {GPTQ_CONFIG: GPTQ, AWQ_CONFIG: AWQ}
"""Read where config.json itself says nothing."""
PER_ROW = -1
"""As a group size: all columns of a row share one scale."""


@dataclass(frozen=True)
class Scheme:
    method: str
    groups: frozenset[int]
    """Group sizes that the configuration states; every matrix has one of them. PER_ROW is one."""
    symmetric: bool = False
    """Stated: the zero point is 8 everywhere. (For compressed-tensors: of at least one group of modules.)"""
    bits: frozenset[int] = frozenset({4})
    label: str = ""
    """gptq: the checkpoint_format, gptq or gptq_v2."""


def scheme_of_folder(folder: Path) -> Scheme | None:
    """None for an unquantised folder. Raises as `scheme_from_json`."""
    scheme = scheme_from_json(read_json(folder / CONFIG), str(folder / CONFIG))
    for name, method in _BESIDE.items():
        if scheme is None and (folder / name).exists():
            return _scheme({"quant_method": method, **read_json(folder / name)}, str(folder / name))
    return scheme


def scheme_from_json(raw: Mapping[str, Any], where: str) -> Scheme | None:
    """From config.json, `where` in messages; None for an unquantised folder. Which modules are quantised is not read
    from it (modules_to_not_convert, ignore): their tensors tell, so the two cannot differ.

    Raises UnsupportedModelError that names the key, CheckpointError for values that make no sense.
    """
    config = raw.get("quantization_config")
    if config is None:
        config = raw.get("compression_config")
    if not config:
        return None
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: quantization_config is {config!r}, expected an object")
    return _scheme(config, where, ": quantization_config")


def _scheme(config: Mapping[str, Any], where: str, key: str = "") -> Scheme:
    fields = _Fields(config, where + key)
    readers = {AWQ: _awq, GPTQ: _gptq, COMPRESSED: _compressed}
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in readers:
        raise UnsupportedModelError(f"{where}: quantisation {method!r} is not supported; supported: {SUPPORTED}")
    return readers[method](fields)


class _Fields:
    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw, self.where = raw, where

    def one_of(self, name: str, allowed: tuple[Any, ...], value: Any) -> Any:
        """`value`, or a refusal unless it is one of `allowed` (true and false are no numbers)."""
        if not any(value == each and type(value) is type(each) for each in allowed):
            known = ", ".join(repr(each) for each in allowed)
            raise UnsupportedModelError(
                f"{self.where}.{name} is {value!r}, which is not supported; supported: {known}. In all: {SUPPORTED}"
            )
        return value

    def group(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != PER_ROW):
            raise CheckpointError(
                f"{self.where}.{name} is {value!r}, expected a positive integer, or -1 for whole rows"
            )
        return value


def _awq(fields: _Fields) -> Scheme:
    raw = fields.raw
    fields.one_of("bits", (4,), raw.get("bits", raw.get("w_bit")))
    version = raw.get("version", "gemm")
    fields.one_of("version", ("gemm",), version.lower() if isinstance(version, str) else version)
    return Scheme(AWQ, frozenset({fields.group("group_size", raw.get("group_size", raw.get("q_group_size", 128)))}))


def _gptq(fields: _Fields) -> Scheme:
    raw = fields.raw
    fields.one_of("bits", (4,), raw.get("bits"))
    if raw.get("is_marlin_format"):
        raise UnsupportedModelError(
            f"{fields.where}.is_marlin_format is set, which is not supported; supported: {SUPPORTED}"
        )
    label = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), raw.get("checkpoint_format", "gptq"))
    group = fields.group("group_size", raw.get("group_size", 128))
    return Scheme(GPTQ, frozenset({group}), fields.one_of("sym", (True, False), raw.get("sym", True)), label=label)


def _compressed(fields: _Fields) -> Scheme:
    raw = fields.raw
    parts = raw.get("config_groups")
    if not isinstance(parts, dict) or not parts:
        raise CheckpointError(f"{fields.where}.config_groups is {parts!r}, expected an object with at least one group")
    groups, bits, symmetric = set(), set(), False
    for name, part in parts.items():
        if not isinstance(part, dict) or not isinstance(part.get("weights"), dict):
            raise UnsupportedModelError(
                f"{fields.where}.config_groups.{name} quantises no weights; supported: {SUPPORTED}"
            )
        own = _Fields(part, f"{fields.where}.config_groups.{name}")
        own.one_of("format", ("pack-quantized",), part.get("format") or raw.get("format"))
        for activations in ("input_activations", "output_activations"):
            own.one_of(activations, (None,), part.get(activations))
        weights = _Fields(part["weights"], f"{own.where}.weights")
        bits.add(weights.one_of("num_bits", (4, 8), weights.raw.get("num_bits")))
        weights.one_of("type", ("int",), weights.raw.get("type", "int"))
        strategy = weights.one_of("strategy", ("group", "channel"), weights.raw.get("strategy"))
        is_row = strategy == "channel"
        groups.add(PER_ROW if is_row else weights.group("group_size", weights.raw.get("group_size")))
        symmetric |= weights.one_of("symmetric", (True, False), weights.raw.get("symmetric", True))
    return Scheme(COMPRESSED, frozenset(groups), symmetric, frozenset(bits))
