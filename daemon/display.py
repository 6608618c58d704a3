"""What `start` shows on standard error: on a terminal a bar while weights load and a summary when ready, else log
lines."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from deepinfer.daemon.start_times import in_words

WIDE = 240
logger = logging.getLogger(__name__)


class _Bytes(DownloadColumn):
    """Of steps that are measured in bytes."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


class StartDisplay:
    """A bar on a terminal, a line per step elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last = ""

    def progress(self, what: str, done: int, total: int) -> None:
        begins = what != self._last
        self._last = what
        if not self._console.is_terminal:
            if begins:
                logger.info("%s ...", what)
            return
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                _Bytes(binary_units=True),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
        if begins and self._task is not None:
            self._bar.remove_task(self._task)
        if begins:
            self._task = self._bar.add_task(what, total=total or None)
        if self._task is not None:
            self._bar.update(self._task, completed=done)

    def ready(self, status: dict[str, Any], connection_file: Path) -> None:
        self._close_bar()
        if not self._console.is_terminal:
            fields = {
                "seconds": status["ready_seconds"],
                "connection_file": connection_file,
                "endpoint": status["endpoint"],
            }
            logger.info("ready after %s s", status["ready_seconds"], extra={"fields": fields})
            return
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in summary_rows(status):
            table.add_row(name, value)
        table.add_row("connection file", str(connection_file))
        self._console.print(f"ready after {status['ready_seconds']} s", style="bold", highlight=False)
        self._console.print(table, highlight=False)

    def failed(self, error: str) -> None:
        self._close_bar()
        if not self._console.is_terminal:
            logger.error("%s", error)
            return
        self._console.print(f"error: {error}", style="red", highlight=False, markup=False)

    def stopping(self, cut: bool) -> None:
        words = "stopping now" if cut else "stopping when running requests have finished"
        if not self._console.is_terminal:
            logger.info(words)
            return
        self._console.print(words, highlight=False)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def wide_console() -> Console:
    """For tables on standard output: cut to a terminal's width, and whole lines for other programs."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


WATCHED_BY = ("metrics_endpoint", "prometheus", "publisher_error")
"""Shown when they are there: where else subscribers and Prometheus come in, and why nothing is published any more."""


def summary_rows(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Effective values of a running daemon, for people."""
    engine = status["engine"]
    arena = "off"
    if engine["cpu_offload_enabled"]:
        pinned = "pinned" if engine["arena_pinned"] else "pageable"
        arena = f"{mib(engine['cpu_offload_budget_bytes'])} of host memory at most, {pinned}"
    linears = ", ".join(f"{count} x {kind}" for kind, count in engine["linears"].items())
    return [
        ("model", f"{engine['model']} ({engine['family']}, {engine['layers']} layers)"),
        ("weights", _files(engine["checkpoint"])),
        (
            "device",
            f"{engine['device']}, {engine['threads']} threads ({engine['runtime']['numba_threading_layer']})",
        ),
        ("compute", f"{engine['compute_dtype']}; {linears}; head {engine['head']}"),
        ("attention", f"{engine['attention']}, KV {engine['kv_cache_dtype']}"),
        ("key bias", _key_bias(engine["kv_key_bias"])),
        ("batch invariant", "yes" if engine["batch_invariant"] else "no"),
        ("context", f"{engine['context']:,} tokens"),
        (
            "KV pool",
            f"{engine['num_blocks']:,} blocks of {engine['block_size']} tokens = {engine['token_capacity']:,} tokens "
            f"({engine['pool_reason']})",
        ),
        *sliding_layers(engine["layer_groups"]),
        (
            "memory",
            f"weights {mib(engine['weight_bytes'])}, pool {mib(engine['pool_bytes'])}, "
            f"passes {mib(engine['memory_plan']['activations'] + engine['memory_plan']['scratch'])}",
        ),
        ("swap", arena),
        ("load", in_words(engine["load"])),
        ("endpoint", str(status["endpoint"])),
        *((name.replace("_", " "), status[name]) for name in WATCHED_BY if name in status),
    ]


def sliding_layers(groups: dict[str, int]) -> list[tuple[str, str]]:
    """What `LayerGroups.describe` said, as rows of a table; none for a model without windows."""
    if not groups["window"]:
        return []
    unused = f"; room for {groups['padding_layers']} layers is unused" if groups["padding_layers"] else ""
    rows = f"{groups['sliding_rows']} of the {groups['rows_per_block']} rows of a block"
    return [("sliding layers", f"they keep {groups['window']:,} tokens of a context that decodes, {rows}{unused}")]


def _files(checkpoint: dict[str, Any]) -> str:
    """Format and types of the tensors, and whatever a loader had to say besides."""
    types = ", ".join(f"{count} x {name}" for name, count in checkpoint["tensor_types"].items())
    notes = [
        f"{name.replace('_', ' ')} ({', '.join(f'{key} {value}' for key, value in checkpoint[name].items())})"
        for name in ("quantisation", "kv_scales")
        if name in checkpoint
    ]
    return "; ".join([f"{checkpoint['format']}: {types}", *notes])


def _key_bias(choice: dict[str, Any]) -> str:
    biased, split = len(choice["layers"]), len(choice["split_layers"])
    counted = f"{split} of {biased} layers split; " if biased else ""
    return f"{choice['mode']}: {counted}{choice['reason']}"


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
