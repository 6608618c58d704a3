"""`deepinfer-daemon bench loading`: how long files take to become weights, beside a plain read of the same files."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from deepinfer.daemon.bench.conditions import conditions, weight_files
from deepinfer.daemon.bench.loading_files import LAYER_OF_3B, SMOLLM2, TYPES, Shape, fitting, write_random_model
from deepinfer.daemon.bench.results import write_json
from deepinfer.daemon.bench.rounds import spread_of
from deepinfer.kernels.cpu.large_pages import untouched_bytes
from deepinfer.kernels.cpu_runtime import configure_threads
from deepinfer.stages.model import load_model, open_checkpoint

DEFINITIONS = {
    "read_s": "seconds to read the files into memory that was written before, one after the other, by one thread",
    "fill_s": "seconds to fill fresh memory of the size of the weights, by all threads",
    "load_s": "seconds from the open checkpoint to the model, its finite check and its packed weights",
    "load_cpu_s": "processor time of that, of all threads and of the system for them",
    "times_a_read": "load_s over read_s of the same round",
    "times_a_fill": "load_s over fill_s of the same round",
    "spread": "median, least and greatest of the rounds, and bounds of the median; within a round all take turns",
    "cache": "the files were read before, so the system has them in memory",
}
_SHAPES = (SMOLLM2, LAYER_OF_3B)


class _Round(NamedTuple):
    read_s: float
    fill_s: float
    load_s: float
    load_cpu_s: float


def run_loading_bench(
    models: Sequence[Path], rounds: int, threads: int, output: Path | None, types: Sequence[str] = TYPES
) -> dict[str, Any]:
    """Of `models`, or of files of random weights in every type that it writes and deletes. Prints a table, writes JSON,
    returns what it wrote."""
    configure_threads(threads)
    click.echo(f"{'file':34} {'MB':>7} {'weights MB':>11} {'read GB/s':>10} {'load GB/s':>10} {'times a read':>22}")
    rows = [_row(name, path, rounds) for name, path in (_given(models) if models else _random(types))]
    report = {**conditions(), "threads": threads, "rounds": rounds, "definitions": DEFINITIONS, "rows": rows}
    write_json(report, output)
    return report


def _given(models: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    return ((path.name, path) for path in models)


def _random(types: Sequence[str]) -> Iterator[tuple[str, Path]]:
    with tempfile.TemporaryDirectory(prefix="deepinfer-loading-") as folder:
        for shape in _SHAPES:
            for type_name in types:
                yield _written(Path(folder), fitting(shape, type_name), type_name)
                for file in Path(folder).iterdir():
                    file.unlink()


def _written(folder: Path, shape: Shape, type_name: str) -> tuple[str, Path]:
    path = folder / "model.gguf"
    write_random_model(path, shape, type_name)
    return f"{shape.name}, {type_name}", path


def _row(name: str, path: Path, rounds: int) -> dict[str, Any]:
    files = list(weight_files(path))
    file_bytes = sum(file.stat().st_size for file in files)
    buffer = bytearray(max(file.stat().st_size for file in files))
    _round(path, files, buffer, 1 << 20)  # Compiles kernels, and brings the files into the cache.
    weight_bytes = load_model(open_checkpoint(path)).weight_bytes
    measured = [_round(path, files, buffer, weight_bytes) for _ in range(rounds)]
    spreads = {field: spread_of([getattr(one, field) for one in measured]) for field in _Round._fields}
    spreads["times_a_read"] = times = spread_of([one.load_s / one.read_s for one in measured])
    spreads["times_a_fill"] = spread_of([one.load_s / one.fill_s for one in measured])
    read, load = (file_bytes / 1e9 / spreads[field].median for field in ("read_s", "load_s"))
    click.echo(
        f"{name:34} {file_bytes / 1e6:>7.0f} {weight_bytes / 1e6:>11.0f} {read:>10.2f} {load:>10.2f} "
        f"{f'{times.median:.2f} ({times.min:.2f} to {times.max:.2f})':>22}"
    )
    sizes = {"file": name, "file_bytes": file_bytes, "weight_bytes": weight_bytes}
    return {**sizes, **{field: spread._asdict() for field, spread in spreads.items()}}


def _round(path: Path, files: Sequence[Path], buffer: bytearray, weight_bytes: int) -> _Round:
    began = time.perf_counter()
    for file in files:
        _read(file, buffer)
    read = time.perf_counter()
    untouched_bytes(weight_bytes).fill_(1)
    filled = time.perf_counter()
    gc.collect()
    checkpoint = open_checkpoint(path)
    start, start_cpu = time.perf_counter(), time.process_time()
    load_model(checkpoint)
    end, end_cpu = time.perf_counter(), time.process_time()
    return _Round(read - began, filled - read, end - start, end_cpu - start_cpu)


def _read(file: Path, buffer: bytearray) -> None:
    room = memoryview(buffer)
    with file.open("rb", buffering=0) as stream:
        done = 0
        while count := stream.readinto(room[done:]):
            done += count
