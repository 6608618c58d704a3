"""What quantising changes in what a model says: logits of source and result over a text, both computed in fp32."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from deepinfer.daemon.display import mib
from deepinfer.daemon.quality.measure import compare, perplexity_of
from deepinfer.daemon.quality.paged import PagedModel
from deepinfer.daemon.quality.text import cut_windows, name_of, read_text
from deepinfer.daemon.quantize.config import Quantize
from deepinfer.daemon.quantize.report import bar
from deepinfer.daemon.setting import ConfigError
from deepinfer.daemon.target import target_of
from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.cpu_runtime import configure_threads
from deepinfer.kernels.devices import DeviceError, open_device
from deepinfer.kernels.ops import Ops
from deepinfer.stages.model import load_model, load_tokenizer, open_checkpoint
from deepinfer.stages.model.checkpoint import Checkpoint

_DTYPE = "fp32"
_CHUNK = 256
ROOM = 0.9
"""Of the memory that is free, how much a model may take here."""


def take_threads(settings: Quantize) -> None:
    """Raises ConfigError."""
    try:
        configure_threads(settings.threads or len(os.sched_getaffinity(0)))
    except ValueError as error:
        raise ConfigError(str(error), "threads") from error


def open_compute(settings: Quantize) -> Ops:
    """Where models run here. Raises ConfigError."""
    try:
        return open_device(settings.device)
    except DeviceError as error:
        raise ConfigError(str(error), "device") from error


def check_memory(settings: Quantize, ops: Ops, checkpoint: Checkpoint) -> str:
    """Why nothing is to be compared; empty if it is. Raises ConfigError before any work for what cannot be compared."""
    if settings.kld == "off":
        return "--kld is off"
    config = checkpoint.config
    read_text(settings.text, "text")
    if settings.window > config.max_context:
        words = f"window is {settings.window}; the longest context of this model is {config.max_context}"
        return _unless_asked(settings, words, "window")
    target = target_of(ops)
    weights, logits = checkpoint.estimate_weight_bytes(_DTYPE), 4 * settings.positions * config.vocab_size
    wants = [
        (f"the source in {_DTYPE}", weights, target.free, target.name),
        ("its logits", logits, target.host_free, "the host"),
    ]
    if not target.gpu:
        wants = [(f"the source in {_DTYPE} and its logits", weights + logits, target.free, target.name)]
    for what, need, free, where in wants:
        if need > ROOM * free:
            return _unless_asked(settings, f"kld: {what} need {mib(need)}, {mib(free)} are free on {where}", "kld")
    return ""


def _unless_asked(settings: Quantize, words: str, name: str) -> str:
    if settings.kld == "on":
        raise ConfigError(words, name)
    return words


def text_windows(settings: Quantize, source: Path) -> list[list[int]]:
    """Token ids that both models read. Raises ConfigError for a text that is too short."""
    tokenizer = load_tokenizer(source)
    ids = tokenizer.encode(read_text(settings.text, "text"), add_special=False)
    return cut_windows(ids, tokenizer.encode(""), settings.positions, settings.window, settings.skip)


def measure_divergence(
    settings: Quantize, ops: Ops, source: Path, result: Path, windows: list[list[int]]
) -> dict[str, Any]:
    """One model after the other is in memory."""
    tokens = sum(len(window) for window in windows)
    with bar("comparing", 2 * tokens) as advance:
        exact = list(_logits("source", _paged(source, ops, settings), windows, settings.skip, advance))
        got = _logits("result", _paged(result, ops, settings), windows, settings.skip, advance)
        return {
            "compute_dtype": _DTYPE,
            "text": name_of(settings.text),
            **compare(got, exact, windows, settings.skip),
            "source_perplexity": perplexity_of(exact, windows, settings.skip),
        }


def _logits(
    name: str, paged: PagedModel, windows: list[list[int]], skip: int, advance: Callable[[str, int], None]
) -> Iterator[torch.Tensor]:
    for window in windows:
        for rows in paged.logits(window, skip):
            yield rows.cpu()
        advance(name, len(window))


def _paged(path: Path, ops: Ops, settings: Quantize) -> PagedModel:
    model = load_model(open_checkpoint(path), _DTYPE, ops=ops)
    return PagedModel(model, resolve_kv_format("auto", _DTYPE), settings.window, _CHUNK)
