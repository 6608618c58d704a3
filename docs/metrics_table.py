"""Writes the table of docs/metrics.md from the registry itself: a name, its type, its label, what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from deepinfer.daemon.metrics import KERNEL_COUNTERS, Metrics
from deepinfer.daemon.telemetry import CountingTelemetry
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.clock import Timings
from deepinfer.stages.memory.entries import State
from deepinfer.stages.stats import EngineCounters
from deepinfer.stages.telemetry import RequestRecord

PAGE = Path(__file__).parent / "metrics.md"
BEGIN, END = "<!-- table: written by docs/metrics_table.py -->\n", "<!-- end of table -->\n"


class Ones(dict):
    """A snapshot in which every number is 1."""

    def __missing__(self, key: str) -> int:
        return 1


def specimen() -> Metrics:
    """A registry in which everything has happened once, so that every label shows."""
    board = StatusBoard({})
    board.summary = Ones(sliding_windows=[])
    counters = dict.fromkeys([*EngineCounters().as_dict(), *KERNEL_COUNTERS], 1)
    board.stats = Ones(counters, states={state.value: 1 for state in State})
    board.health = {"decode": {"still_s": 0.0}}
    metrics = Metrics(board)
    telemetry = CountingTelemetry(metrics)
    telemetry.refused("queue_full")
    telemetry.event("ready")
    for reason, code in (("length", None), ("error", "engine_failed")):
        telemetry.finished(record(reason, code))
    for counter in (metrics.published, metrics.dropped):
        counter.labels("events")
    return metrics


def record(reason: str, code: str | None) -> RequestRecord:
    numbers: dict[str, Any] = dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens"), 2)
    times: dict[str, Any] = dict.fromkeys(("ttft_s", "tpot_s", "e2e_s"), 0.5)
    timings = Timings(parks=1)
    return RequestRecord(request=1, id=1, finish_reason=reason, code=code, timings=timings, **numbers, **times)


def name_of(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def label_of(family: Metric) -> str:
    labels = {label for sample in family.samples for label in sample.labels} - {"le"}
    return ", ".join(f"`{label}`" for label in sorted(labels))


def table() -> str:
    rows = ["| metric | type | label | |", "|---|---|---|---|"]
    for family in sorted(specimen().registry.collect(), key=name_of):
        rows.append(f"| `{name_of(family)}` | {family.type} | {label_of(family)} | {family.documentation} |")
    return "\n".join(rows) + "\n"


def write() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    write()
