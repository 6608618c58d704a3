"""The commands that look after models on this machine: `pull`, `models` and `quantize`."""

from __future__ import annotations

import json
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
@click.argument("name", metavar="MODEL")
@click.option("--revision", help="A branch, a tag or a commit. [default: main]")
def pull(name: str, revision: str | None) -> None:
    """Fetch MODEL into the cache of this machine: org/name, org/name:FILE.gguf, org/name:Q4_K_M, or an alias.

    Goes on where an earlier fetch was cut, and compares every file with the checksum that the hub states. HF_TOKEN
    opens private and gated models, HF_HOME says where the cache is."""
    from deepinfer.daemon.model_pull import run_pull
    from deepinfer.stages.model.errors import ModelError

    try:
        run_pull(name, revision)
    except (ConfigError, ModelError) as error:
        fail(str(error), EXIT_CONFIG)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON, with paths.")
def models(as_json: bool) -> None:
    """Show which models are on this machine, and whether they load. The names are what --model takes."""
    from deepinfer.daemon.model_list import local_models, print_models

    found = local_models()
    if as_json:
        click.echo(json.dumps([model.describe() for model in found], indent=1))
    else:
        print_models(found)


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
