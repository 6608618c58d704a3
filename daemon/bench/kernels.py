"""`deepinfer-daemon bench kernels`: what the kernels of this device reach, beside a plain copy of its memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import torch

from deepinfer.daemon.bench.attention import FORMATS, HEADS, Heads, bench_attention
from deepinfer.daemon.bench.conditions import conditions
from deepinfer.daemon.bench.matmul import SHAPES, Shape, bench_gemv, bench_step
from deepinfer.kernels.cpu_runtime import configure_threads
from deepinfer.kernels.cuda.nvrtc import REFERENCE_ARCH, CompileError
from deepinfer.kernels.cuda.report import rows as instruction_rows
from deepinfer.kernels.devices import DeviceError, open_device
from deepinfer.kernels.ops import Ops

DEFINITIONS = {
    "gb_per_s": "bytes of keys, values and scales, or of weights, that a call reads, over its time",
    "copy_gb_per_s": "bytes that torch's copy within the device's memory reads and writes, over its time",
    "of_copy": "gb_per_s over copy_gb_per_s of the same round",
    "speed_of_fp16": "seconds of fp16 over seconds of the format in the same round",
    "spread": "median, least and greatest of the rounds; within a round all arms take turns",
}


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    heads: tuple[Heads, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    cold_bytes: int
    """What a call reads at least, so that no cache holds it."""
    shapes: tuple[Shape, ...] = ()
    """Of the GEMV."""
    step: Shape | None = None
    step_context: int = 1024
    formats: tuple[str, ...] = FORMATS


ON_THE_CPU = Plan(HEADS[:2], (1024, 4096, 16384), (1, 4), 128 << 20)
ON_A_GPU = Plan(HEADS, (1024, 2048, 4096, 8192, 16384, 32768, 65536), (1, 4), 256 << 20, SHAPES, SHAPES[1])


def run_bench_kernels(
    device: str, rounds: int, threads: int, output: Path | None, plan: Plan | None = None
) -> dict[str, Any]:
    """Prints tables, writes JSON, returns what it wrote."""
    try:
        ops = open_device(device)
    except DeviceError as error:
        raise click.ClickException(str(error)) from error
    configure_threads(threads)
    plan = plan or (ON_THE_CPU if ops.name == "cpu" else ON_A_GPU)
    backend = "cpu-native" if ops.name == "cpu" else ops.name
    click.echo(f"backend: {backend}; {rounds} rounds, medians")
    if ops.name == "host-emulation":
        click.echo("CUDA kernels on the CPU: these times say nothing about a GPU")
    with torch.inference_mode():
        report = {
            "backend": backend,
            **conditions(),
            "versions_of_cuda": _cuda_versions(),
            "threads": threads,
            "rounds": rounds,
            "definitions": DEFINITIONS,
            "paged_decode": _attention(ops, plan, rounds),
            "gemv": _gemv(ops, plan, rounds),
            "step": None if plan.step is None else _step(ops, plan, plan.step, rounds),
            "instructions": _instructions(plan),
        }
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(_rounded(report), indent=1) + "\n")
        click.echo(f"written to {output}")
    return report


def _attention(ops: Ops, plan: Plan, rounds: int) -> list[dict[str, Any]]:
    click.echo("\npaged decode: heads   context  batch  format               GB/s  of copy  speed of fp16")
    found = []
    for heads in plan.heads:
        for context in plan.contexts:
            for batch in plan.batches:
                rows = bench_attention(ops, heads, context, batch, rounds, plan.cold_bytes, plan.formats)
                for row in rows:
                    click.echo(
                        f"{heads.model:>13} {heads.query:>2}/{heads.kv}x{heads.dim:<4}{context:>7}{batch:>7}  "
                        f"{row['format']:18}{row['gb_per_s']['median']:>7.1f}{row['of_copy']['median']:>8.0%}"
                        f"{row['speed_of_fp16']['median']:>11.2f}"
                    )
                found += rows
    return found


def _gemv(ops: Ops, plan: Plan, rounds: int) -> list[dict[str, Any]]:
    found = []
    for shape in plan.shapes:
        click.echo(f"\nW4A16 GEMV, {shape.name}: matrix        rows   GB/s  of copy")
        for matrix in shape.matrices:
            for row in bench_gemv(ops, shape, matrix, rounds, plan.cold_bytes):
                click.echo(
                    f"{matrix:>10} {row['outputs']:>6}x{row['inputs']:<6}{row['rows']:>8}"
                    f"{row['gb_per_s']['median']:>8.1f}{row['of_copy']['median']:>8.0%}"
                )
                found.append(row)
    return found


def _step(ops: Ops, plan: Plan, shape: Shape, rounds: int) -> dict[str, Any]:
    step = bench_step(ops, shape, plan.step_context, rounds, plan.cold_bytes)
    click.echo(f"\ndecode step, {shape.name}, W4, {step['context']} tokens, {step['bytes_read'] / 1e6:.0f} MB read")
    for name in ("computed", "replayed"):
        milliseconds, share = step[name]["milliseconds"]["median"], step[name]["of_roofline"]["median"]
        click.echo(f"{name:>10} {milliseconds:>8.3f} ms   {share:.0%} of what a copy allows")
    return step


def _instructions(plan: Plan) -> dict[str, Any]:
    """Of the CUDA kernels, whatever the device: they are compiled and disassembled, which needs no GPU."""
    shapes = {(heads.dim, heads.query // heads.kv) for heads in plan.heads}
    try:
        found = [row for dim, group in sorted(shapes) for row in instruction_rows(dim, group)]
    except CompileError as error:
        click.echo(f"\nno instruction counts: {error}")
        return {"error": str(error)}
    click.echo("\nsm_86 instructions for an element: head_dim  group  format              K loop  V loop  of fp16")
    for row in found:
        click.echo(
            f"{row.head_dim:>42}{row.group:>7}  {row.kv:18}{row.k_loop:>8.2f}{row.v_loop:>8.2f}{row.of_fp16:>9.2f}"
        )
    return {"arch": REFERENCE_ARCH, "rows": [row._asdict() for row in found]}


def _cuda_versions() -> dict[str, str]:
    """Of the packages that launch and compile, as far as they are installed."""
    found = {}
    for name in ("cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvdisasm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**found, "cuda of torch": str(torch.version.cuda)}


def _rounded(value: Any) -> Any:
    """Four significant digits: more are noise."""
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
