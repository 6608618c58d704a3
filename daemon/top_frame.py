"""One frame of `deepinfer-daemon top`, from two snapshots: no sockets, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PREFIX = "deepinfer_"
BAR_CELLS = 30
EVENTS_SHOWN = 5
STATES = ("waiting", "prefill", "decode", "swapping_out", "swapped", "swapping_in")
Message = Mapping[str, Any]


def frame(status: Mapping[str, Any], before: Message, now: Message, events: Sequence[Message]) -> RenderableType:
    """`status` is what the control socket answered once; `before` and `now` are messages of the topic `metrics`, one
    interval apart; `events` the latest ones, oldest first. Rates are between the two."""
    rows = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows.add_column(style="dim")
    rows.add_column()
    rows.add_column()
    for name, *cells in _rows(Interval(before, now)):
        rows.add_row(name, *cells)
    return Group(_head(status, now), rows, *(_event_line(event) for event in events[-EVENTS_SHOWN:]))


class Interval:
    """Values now, and what counters gained since the snapshot before."""

    def __init__(self, before: Message, now: Message) -> None:
        self.seconds = now["time"] - before["time"]
        self._before, self._now = before["metrics"], now["metrics"]

    def value(self, name: str, default: Any = 0) -> Any:
        return self._now.get(name, self._now.get(PREFIX + name, default))

    def gained(self, name: str) -> float:
        return self.value(name) - self._before.get(PREFIX + name, self._before.get(name, 0))

    def rate(self, name: str) -> float:
        return self.gained(name) / self.seconds if self.seconds > 0 else 0.0

    def mean(self, histogram: str) -> float | None:
        """Of what was observed since; None when nothing was."""
        empty = {"count": 0, "sum": 0.0}
        new, old = self._now.get(PREFIX + histogram, empty), self._before.get(PREFIX + histogram, empty)
        count = new["count"] - old["count"]
        return (new["sum"] - old["sum"]) / count if count else None


def _head(status: Mapping[str, Any], now: Message) -> Text:
    engine = status["engine"]
    style = {"ready": "bold green", "draining": "bold yellow", "restarting": "bold yellow"}.get(
        now["phase"], "bold red"
    )
    what = f"  {engine['model']}  {engine['device']}  KV {engine['kv_cache_dtype']}" if engine else ""
    return Text.assemble((now["phase"], style), what)


def _rows(at: Interval) -> list[tuple[RenderableType, ...]]:
    requests = at.value("requests", {})
    counts = "  ".join(f"{requests.get(state, 0)} {state.replace('_', ' ')}" for state in STATES)
    total, free, cached = at.value("kv_blocks"), at.value("kv_blocks_free"), at.value("kv_blocks_cached")
    arena, budget = at.value("cpu_offload_bytes"), at.value("cpu_offload_budget_bytes")
    return [
        ("requests", counts, ""),
        ("clients", f"{at.value('live_requests')} live  {at.value('blocked_requests')} not reading", ""),
        ("blocks", _bar(total - free, total), f"{total - free:,} of {total:,} in use, {cached:,} kept for reuse"),
        ("host", _bar(arena, budget), f"{_mib(arena)} of {_mib(budget)}, {at.value('swapped_requests')} requests"),
        ("tokens/s", f"{at.rate('generation_tokens_total'):,.1f} generated", _prompt_rate(at)),
        ("read", _bandwidth(at), ""),
        ("first token", _seconds(at.mean("time_to_first_token_seconds")), "mean since the snapshot before"),
        ("next token", _seconds(at.mean("inter_token_latency_seconds")), "mean since the snapshot before"),
        ("swaps", f"{at.value('requests_swapped_total'):,} out  {at.value('requests_resumed_total'):,} in", ""),
        ("stages", _stages(at), f"{at.value('engine_deaths_total')} engines died"),
    ]


def _prompt_rate(at: Interval) -> str:
    return f"{at.rate('prompt_tokens_computed_total'):,.1f} of prompts"


def _bandwidth(at: Interval) -> str:
    """Of decode steps, while they ran: what they had to read, whatever the caches of the processor spared them."""
    seconds = at.gained("decode_seconds_total")
    if at.value("decode_weight_bytes_total", None) is None:
        return "unknown for this model"
    if seconds <= 0:
        return "no decode step"
    weights, kv = at.gained("decode_weight_bytes_total"), at.gained("decode_kv_bytes_total")
    return f"{weights / seconds / 1e9:,.2f} GB/s of weights  {kv / seconds / 1e9:,.2f} GB/s of KV"


def _stages(at: Interval) -> Text:
    still = at.value("stage_still_seconds", {})
    if not still:
        return Text("not heard of yet", style="yellow")
    words = [
        (f"{stage} ok  ", "green") if not s else (f"{stage} still {s:.0f} s  ", "red") for stage, s in still.items()
    ]
    return Text.assemble(*words)


def _bar(part: float, whole: float) -> RenderableType:
    return ProgressBar(total=max(whole, 1), completed=part, width=BAR_CELLS)


def _mib(count: float) -> str:
    return f"{count / (1 << 20):,.1f} MiB"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:,.1f} ms"


def _event_line(event: Message) -> Text:
    fields = {name: value for name, value in event.items() if name not in ("v", "seq", "time", "instance", "event")}
    words = "  ".join(f"{name} {value}" for name, value in fields.items() if value not in (None, 0))
    return Text.assemble((f"#{event['seq']} {event['event']}", "dim"), f"  {words}")
