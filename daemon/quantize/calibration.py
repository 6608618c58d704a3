"""What the matrices of a model meet when it reads a text: how active each input channel is, and some whole inputs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.daemon.display import mib
from deepinfer.daemon.quality.paged import PagedModel
from deepinfer.daemon.quality.text import read_text
from deepinfer.daemon.quantize.config import CALIBRATION, Quantize
from deepinfer.daemon.quantize.divergence import ROOM
from deepinfer.daemon.setting import ConfigError
from deepinfer.daemon.target import target_of
from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.linear import Linear
from deepinfer.kernels.ops import Ops
from deepinfer.stages.model import Model, load_model, load_tokenizer, open_checkpoint
from deepinfer.stages.model.checkpoint import Checkpoint
from deepinfer.stages.model.precision import choose_dtype

_WINDOW = 512
_CHUNK = 128
_ROWS = 256
"""Whole inputs that are kept of each matrix, evenly of all chunks."""
FORMS = ("qkv", "o", "gate_up", "down")


class Activity(NamedTuple):
    mean_abs: Tensor
    """float32 [columns]."""
    mean_square: Tensor
    rows: Tensor
    """bf16 [at most 256, columns]: some of the inputs."""


def activities(settings: Quantize, ops: Ops, checkpoint: Checkpoint) -> list[dict[str, Activity]]:
    """For each layer, by form. Loads the whole source. Raises ConfigError where memory has no room for it."""
    path, target = checkpoint.path, target_of(ops)
    dtype = choose_dtype("auto", checkpoint.source.headers)
    need = checkpoint.estimate_weight_bytes(dtype, cuda_kernels=target.cuda_kernels)
    if need > ROOM * target.free:
        words = f"the source in {dtype} needs {mib(need)}, {mib(target.free)} are free on {target.name}"
        raise ConfigError(f"awq is on; {words}", "awq")
    windows = _windows(settings, path, checkpoint.config.max_context)
    every = max(1, sum(len(window) for window in windows) // _ROWS)
    model = load_model(open_checkpoint(path), dtype, ops=ops)
    recorders = [{form: _Recorder(getattr(layer, form), every) for form in FORMS} for layer in model.layers]
    paged = PagedModel(_recorded(model, recorders), resolve_kv_format("auto", dtype), _WINDOW, _CHUNK)
    for window in windows:
        for _ in paged.logits(window, len(window)):
            pass
    return [{form: recorder.activity() for form, recorder in layer.items()} for layer in recorders]


def _windows(settings: Quantize, path: Path, longest: int) -> list[list[int]]:
    text = CALIBRATION.read_text() if settings.calibration is None else read_text(settings.calibration, "calibration")
    tokenizer = load_tokenizer(path)
    begin, ids = tokenizer.encode(""), tokenizer.encode(text, add_special=False)[: settings.calibration_tokens]
    own = min(_WINDOW, longest) - len(begin)
    windows = [begin + ids[at : at + own] for at in range(0, len(ids), own)]
    if not ids:
        raise ConfigError(f"calibration is {settings.calibration!r}, which holds no text", "calibration")
    return windows


def _recorded(model: Model, recorders: list[dict[str, _Recorder]]) -> Model:
    layers = [
        dataclasses.replace(layer, **own)  # type: ignore[arg-type]
        for layer, own in zip(model.layers, recorders, strict=True)
    ]
    return dataclasses.replace(model, layers=tuple(layers))


class _Recorder:
    """A linear form that also looks at what it is given."""

    def __init__(self, inner: Linear, every: int):
        self._inner, self._every = inner, every
        self.kind = inner.kind
        self._abs: Tensor | None = None
        self._square: Tensor | None = None
        self._count = 0
        self._rows: list[Tensor] = []

    @property
    def weight_bytes(self) -> int:
        return self._inner.weight_bytes

    @property
    def step_bytes(self) -> int:
        return self._inner.step_bytes

    def __call__(self, x: Tensor) -> Tensor:
        seen = x.float()
        total, square = seen.abs().sum(0).cpu(), seen.square().sum(0).cpu()
        self._abs = total if self._abs is None else self._abs + total
        self._square = square if self._square is None else self._square + square
        self._rows.append(x[-self._count % self._every :: self._every].to("cpu", torch.bfloat16, copy=True))
        self._count += len(x)
        return self._inner(x)

    def activity(self) -> Activity:
        if self._abs is None or self._square is None:
            raise ValueError("nothing was read")
        return Activity(self._abs / self._count, self._square / self._count, torch.cat(self._rows))
