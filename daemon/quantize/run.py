"""`deepinfer-daemon quantize`: reads the source a tensor at a time, writes the folder, reports what was lost."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer.daemon.bench.conditions import conditions
from deepinfer.daemon.bench.results import write_json
from deepinfer.daemon.quantize.awq import find_scalings
from deepinfer.daemon.quantize.config import Quantize
from deepinfer.daemon.quantize.divergence import (
    check_memory,
    measure_divergence,
    open_compute,
    take_threads,
    text_windows,
)
from deepinfer.daemon.quantize.files import write_files
from deepinfer.daemon.quantize.folder import check_place, check_room, whole_folder
from deepinfer.daemon.quantize.matrices import MatrixError, Scaling, write_matrix, write_plain
from deepinfer.daemon.quantize.plan import Matrix, Plan, codes_per_weight, make_plan
from deepinfer.daemon.quantize.report import bar, print_report
from deepinfer.daemon.quantize.shards import ShardedWriter
from deepinfer.daemon.quantize.source import open_source, quantised_types
from deepinfer.daemon.quantize.workers import Workers
from deepinfer.daemon.setting import ConfigError
from deepinfer.stages.model import resolve_model
from deepinfer.stages.model.checkpoint import Checkpoint

_OTHER_FILES = 64 << 20
"""Room for what lies beside the weights."""


def run_quantize(settings: Quantize, name: str, target: Path, output: Path | None) -> int:
    """Prints a report; returns the exit code. Raises ConfigError and the model's errors, and leaves nothing behind
    then."""
    settings.check()
    take_threads(settings)
    source = resolve_model(name)
    check_place(target, source, settings.force)
    ops = open_compute(settings)  # A device that is not there is refused before anything is written.
    checkpoint = open_source(source)
    with closing(checkpoint.source):
        plan = make_plan(checkpoint.source.headers, checkpoint.config.tie_word_embeddings, settings)
        if not plan.matrices:
            raise ConfigError(f"SRC is {name!r}; no group divides the columns of any of its matrices: nothing to do")
        skipped = check_memory(settings, ops, checkpoint)
        windows = [] if skipped else text_windows(settings, source)
        started = time.monotonic()
        scalings = find_scalings(settings, ops, checkpoint, plan) if settings.awq else {}
        errors, nbytes = _write(settings, checkpoint, plan, scalings, target)
        seconds = round(time.monotonic() - started, 2)
    report = {
        **conditions(),
        "model": name,
        "settings": asdict(settings),
        "requantised": quantised_types(checkpoint),
        "seconds": seconds,
        "source_bytes": sum(header.nbytes for header in checkpoint.source.headers.values()),
        "bytes": nbytes,
        "bits_per_coded_weight": codes_per_weight(plan),
        "left_in_16_bits": list(plan.left),
        "unties_head": plan.unties_head,
        "matrices": [error._asdict() for error in sorted(errors, key=lambda error: -error.relative_l2)],
        "divergence": {"skipped": skipped} if skipped else measure_divergence(settings, ops, source, target, windows),
    }
    print_report(report, target)
    write_json(report, output)
    return 0


def _write(
    settings: Quantize, checkpoint: Checkpoint, plan: Plan, scalings: dict[str, Scaling], target: Path
) -> tuple[list[MatrixError], int]:
    headers, errors = checkpoint.source.headers, []
    where = str(checkpoint.path)
    total = sum(headers[_source(part)].nbytes for part in plan.parts)
    with whole_folder(target) as scratch:
        writer = ShardedWriter(scratch, [part.tensors() for part in plan.parts], settings.shard_mib << 20)
        check_room(target, writer.nbytes + _OTHER_FILES)
        write_files(scratch, checkpoint, plan)
        with closing(writer), Workers() as workers, bar("quantising", total, of_bytes=True) as advance:
            for part in plan.parts:
                scaling = scalings.get(part.name, Scaling())
                tensor = checkpoint.source.read(_source(part))
                if isinstance(part, Matrix):
                    errors.append(write_matrix(part, tensor, scaling, settings.clips, where, writer.write, workers))
                else:
                    write_plain(part, tensor, scaling, where, writer.write)
                advance(part.name, headers[_source(part)].nbytes)
            writer.finish()
    return errors, writer.nbytes


def _source(part: Any) -> str:
    return part.source if isinstance(part, Matrix) else part.name
