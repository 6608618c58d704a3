"""How every bench writes its result: a JSON file, and a picture where matplotlib is there."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from deepinfer.daemon.setting import ConfigError


def write_json(report: Mapping[str, Any], output: Path | None) -> None:
    if output is None:
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    click.echo(f"written to {output}")


def check_plot(plot: Path | None) -> None:
    """Raises ConfigError where a picture is wanted that cannot be drawn, before anything is measured."""
    if plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plot needs matplotlib, which is not installed: pip install 'deepinfer-daemon[plot]'", "plot")
    from matplotlib.figure import Figure

    endings = sorted(Figure().canvas.get_supported_filetypes())
    if plot.suffix.removeprefix(".").lower() not in endings:
        raise ConfigError(f"plot is {plot}; its ending must be one of: {', '.join(endings)}", "plot")


def save_figure(figure: Any, plot: Path) -> None:
    plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(plot)
    click.echo(f"written to {plot}")
