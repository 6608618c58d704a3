"""One frame of `deepinfer-daemon top`, from two snapshots: no sockets, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

PREFIX = "deepinfer_"
BAR_CELLS = 30
EVENTS_SHOWN = 5
STILL_SECONDS = 2.0
"""A stage that has stood still for less is only between two heartbeats."""
STATES = ("waiting", "prefill", "decode", "swapping_out", "swapped", "swapping_in")
Message = Mapping[str, Any]


def frame(before: Message, now: Message, events: Sequence[Message]) -> RenderableType:
    """`before` and `now` are messages of the topic `metrics`, one interval apart, and rates are between the two;
    `events` are the latest ones, oldest first."""
    rows = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows.add_column(style="dim")
    rows.add_column()
    for name, cell in _rows(Interval(before, now)):
        rows.add_row(name, cell)
    return Group(_head(now), rows, *(_event_line(event) for event in events[-EVENTS_SHOWN:]))


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


def _head(now: Message) -> Text:
    engine = now["engine"]
    style = {"ready": "bold green", "draining": "bold yellow", "restarting": "bold yellow"}.get(
        now["phase"], "bold red"
    )
    what = f"  {engine['model']}  {engine['device']}  KV {engine['kv_cache_dtype']}" if engine else ""
    return Text.assemble((now["phase"], style), what)


def _rows(at: Interval) -> list[tuple[str, RenderableType]]:
    requests = at.value("requests", {})
    states = "  ".join(f"{requests.get(state, 0)} {state.replace('_', ' ')}" for state in STATES)
    total, free, cached = at.value("kv_blocks"), at.value("kv_blocks_free"), at.value("kv_blocks_cached")
    arena, budget = at.value("cpu_offload_bytes"), at.value("cpu_offload_budget_bytes")
    generated, prompts = at.rate("generation_tokens_total"), at.rate("prompt_tokens_computed_total")
    first, between = _seconds(at, "time_to_first_token"), _seconds(at, "inter_token_latency")
    swaps = f"{at.value('requests_swapped_total'):,} out  {at.value('requests_resumed_total'):,} in"
    return [
        ("requests", states),
        ("clients", f"{at.value('live_requests')} live requests  {at.value('blocked_requests')} not read"),
        ("blocks", f"{_bar(total - free, total)} {total - free:,} of {total:,} in use, {cached:,} kept for reuse"),
        ("host", f"{_bar(arena, budget)} {_mib(arena)} of {_mib(budget)}, {at.value('swapped_requests')} requests"),
        ("tokens/s", f"{generated:,.1f} generated  {prompts:,.1f} of prompts"),
        ("read", _bandwidth(at)),
        ("latency", f"{first} to the first token  {between} between tokens"),
        ("swaps", swaps),
        ("stages", _stages(at)),
        ("deaths", f"{at.value('engine_deaths_total')} of the engine"),
    ]


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
        (f"{stage} ok  ", "green") if seconds < STILL_SECONDS else (f"{stage} stands for {seconds:.0f} s  ", "red")
        for stage, seconds in still.items()
    ]
    return Text.assemble(*words)


def _bar(part: float, whole: float) -> str:
    full = round(BAR_CELLS * part / whole) if whole else 0
    return "█" * full + "░" * (BAR_CELLS - full)


def _mib(count: float) -> str:
    return f"{count / (1 << 20):,.1f} MiB"


def _seconds(at: Interval, histogram: str) -> str:
    value = at.mean(f"{histogram}_seconds")
    return "-" if value is None else f"{value * 1000:,.1f} ms"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _event_line(event: Message) -> Text:
    fields = {name: value for name, value in event.items() if name not in ("v", "seq", "time", "instance", "event")}
    words = "  ".join(f"{name} {_short(value)}" for name, value in fields.items() if value not in (None, 0))
    return Text.assemble((f"#{event['seq']} {event['event']}", "dim"), f"  {words}")
