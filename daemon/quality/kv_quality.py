"""`deepinfer-daemon kv-quality`: what a KV format changes in what a model says, against keys and values in the compute
dtype. In this process, without sockets; the pool, the attention and the executor are the engine's."""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from deepinfer.daemon.bench.conditions import conditions, model_sha256
from deepinfer.daemon.planner import check_w4_activations
from deepinfer.daemon.quality.config import KvQuality
from deepinfer.daemon.quality.key_offset import with_key_offset
from deepinfer.daemon.quality.measure import measure_exact, measure_format
from deepinfer.daemon.quality.paged import BLOCK_SIZE, PagedModel
from deepinfer.daemon.quality.report import check_plot, gate_failures, print_report, write_plot
from deepinfer.daemon.quality.text import Material, read_material
from deepinfer.daemon.setting import ConfigError
from deepinfer.kernels import KVFormat, resolve_kv_format
from deepinfer.kernels.cpu_runtime import configure_threads
from deepinfer.kernels.devices import DeviceError, open_device
from deepinfer.kernels.ops import Ops
from deepinfer.stages.memory.sizes import blocks_for
from deepinfer.stages.model import Checkpoint, Model, load_model, load_tokenizer, open_checkpoint, resolve_model
from deepinfer.stages.model.key_bias import KeyBiasRule
from deepinfer.stages.model.precision import choose_dtype


def run_kv_quality(settings: KvQuality, output: Path | None, plot: Path | None) -> int:
    """Prints a table; returns the exit code: 1 when the gate failed. Raises ConfigError and the model's errors."""
    settings.check()
    if plot is not None:
        check_plot()
    report = _measure(settings)
    report["gate"]["failed"] = failures = gate_failures(report)
    print_report(report)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        click.echo(f"written to {output}")
    if plot is not None:
        write_plot(report, plot)
        click.echo(f"written to {plot}")
    return 1 if failures else 0


def _measure(settings: KvQuality) -> dict[str, Any]:
    models = _Models(settings)
    material = read_material(settings, load_tokenizer(models.path))
    tokens = _pool_tokens(material, settings)
    if material.longest > models.max_context:
        raise ConfigError(
            f"window is {settings.window} and passkey_tokens {settings.passkey_tokens}; the longest context of this "
            f"model is {models.max_context}"
        )
    base, *formats = models.formats()
    model = models.exact_for(base)
    paged = _paged(model, base, tokens, settings.chunk)
    exact = measure_exact(paged, material, settings.skip, settings.new_tokens)
    eos = frozenset(model.config.eos_token_ids)
    measured = {}
    for number, fmt in enumerate(formats):
        click.echo(f"{fmt.name}, {number + 1} of {len(formats)}", err=True)
        paged = _paged(models.model_for(fmt), fmt, tokens, settings.chunk)
        measured[fmt.name] = measure_format(paged, material, exact, settings.skip, eos)
    return {
        **conditions(),
        "model": settings.model,
        "model_sha256": model_sha256(models.path),
        "engine": {"device": models.ops.name, "threads": models.threads, **_described(model)},
        "settings": {**asdict(settings), "formats": list(measured), "text": material.source},
        "text": {"source": material.source, "tokens": material.tokens, "windows": len(material.windows)},
        "passkey_prompts": [
            {"tokens": len(passkey.prompt), "depth": passkey.depth} for passkey in material.passkeys
        ],
        "baseline": {
            "format": base.name,
            "positions": sum(len(rows) for rows in exact.logits),
            "perplexity": exact.perplexity,
            "passkeys": exact.passkeys,
        },
        "formats": measured,
        "gate": {"max_kld": settings.max_kld, "min_top1": settings.min_top1},
    }  # fmt: skip


def _paged(model: Model, fmt: KVFormat, tokens: int, chunk: int) -> PagedModel:
    try:
        return PagedModel(model, fmt, tokens, chunk)
    except ValueError as error:
        raise ConfigError(f"formats has {fmt.name}, which {model.ops.name} does not run here: {error}") from error


def _pool_tokens(material: Material, settings: KvQuality) -> int:
    """For the longest sequence, and for all greedy ones side by side."""
    greedy = sum(blocks_for(len(prompt) + settings.new_tokens, BLOCK_SIZE) for prompt in material.prompts)
    return max(blocks_for(material.longest, BLOCK_SIZE), greedy) * BLOCK_SIZE


class _Models:
    """The model, loaded once. Where its keys are biased, the format of the keys decides which layers store them split:
    then it is loaded for each of these formats, and the one before is dropped."""

    def __init__(self, settings: KvQuality) -> None:
        self._settings = settings
        self.threads = settings.threads or len(os.sched_getaffinity(0))
        try:
            configure_threads(self.threads)
            self.exact_ops = open_device(settings.device)
            self.ops = open_device(settings.device, settings.w4_activations)
        except (ValueError, DeviceError) as error:
            raise ConfigError(str(error)) from error
        self.path = resolve_model(settings.model)
        checkpoint = self._open()
        self._dtype = choose_dtype(settings.dtype, checkpoint.source.headers)
        self._biased, self.max_context = checkpoint.config.qkv_bias, checkpoint.config.max_context
        with closing(checkpoint.source):
            check_w4_activations(settings.w4_activations, settings.model, self._dtype, checkpoint)
        self._loaded: tuple[str, Ops, Model] | None = None

    @property
    def rounded(self) -> bool:
        """Whether activations are rounded."""
        return self._settings.w4_activations != "auto"

    def formats(self) -> list[KVFormat]:
        """The compute dtype first, then those that are to be measured, each once: the others, and with rounded
        activations the compute dtype as well. Raises ConfigError if there is none."""
        names = ["auto", *self._settings.format_names]
        found = {fmt.name: fmt for fmt in (resolve_kv_format(name, self._dtype) for name in names)}
        if self.rounded:
            return [next(iter(found.values())), *found.values()]
        if len(found) == 1:
            raise ConfigError(
                f"formats is {self._settings.formats!r}; with compute dtype {self._dtype} that is what the others are "
                "compared with: name another format",
                "formats",
            )
        return list(found.values())

    def _open(self) -> Checkpoint:
        checkpoint, offset = open_checkpoint(self.path), self._settings.key_offset
        return with_key_offset(checkpoint, offset) if offset else checkpoint

    def exact_for(self, fmt: KVFormat) -> Model:
        """With activations in the compute dtype."""
        return self._load(fmt, self.exact_ops if self.rounded else self.ops)

    def model_for(self, fmt: KVFormat) -> Model:
        return self._load(fmt, self.ops)

    def _load(self, fmt: KVFormat, ops: Ops) -> Model:
        variant = fmt.k.name if self._biased else ""
        if self._loaded is None or self._loaded[:2] != (variant, ops):
            self._loaded = None
            rule = KeyBiasRule(self._settings.kv_key_bias, fmt.k)
            model = load_model(self._open(), self._dtype, key_bias=rule, ops=ops)
            self._loaded = (variant, ops, model)
        return self._loaded[2]


def _described(model: Model) -> dict[str, object]:
    """Without the place of the checkpoint, which is this machine's affair: `model_sha256` says which one it was."""
    return {name: value for name, value in model.describe().items() if name != "checkpoint"}
