"""The commands that look after models on this machine: `quantize`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from deepinfer.daemon.cli_common import EXIT_CONFIG, fail
from deepinfer.daemon.config import ConfigError
from deepinfer.daemon.options import options_of
from deepinfer.daemon.quantize.config import Quantize
from deepinfer.daemon.setting import given


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@options_of(Quantize)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write everything as JSON.")
def quantize(source: str, target: Path, output: Path | None, **options: Any) -> None:
    """Write the model SRC as DST, a folder of 4-bit weights that this daemon, vLLM and transformers load.

    SRC is a Hugging Face folder in fp16, bf16 or fp32, a GGUF file, an alias or a hub id."""
    from deepinfer.kernels.openmp import limit_spinning

    limit_spinning()
    from deepinfer.daemon.quantize.run import run_quantize
    from deepinfer.stages.model.errors import ModelError

    try:
        sys.exit(run_quantize(Quantize(**given(options)), source, target, output))
    except (ConfigError, ModelError) as error:
        fail(str(error), EXIT_CONFIG)
