"""The frame of `top` from made-up snapshots."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deepinfer.daemon.top import View, show_top

ENGINE = {"model": "m", "device": "cpu", "kv_cache_dtype": "int8"}
BEFORE = {
    "deepinfer_generation_tokens_total": 100,
    "deepinfer_prompt_tokens_computed_total": 0,
    "deepinfer_decode_seconds_total": 1.0,
    "deepinfer_decode_weight_bytes_total": 0,
    "deepinfer_decode_kv_bytes_total": 0,
    "deepinfer_inter_token_latency_seconds": {"count": 10, "sum": 1.0, "buckets": []},
}
NOW = {
    "deepinfer_requests": {"waiting": 7, "decode": 3, "swapped": 2},
    "deepinfer_live_requests": 12,
    "deepinfer_blocked_requests": 1,
    "deepinfer_kv_blocks": 64,
    "deepinfer_kv_blocks_free": 10,
    "deepinfer_kv_blocks_cached": 4,
    "cpu_offload_bytes": 3 << 20,
    "cpu_offload_budget_bytes": 8 << 20,
    "swapped_requests": 2,
    "requests_swapped_total": 5,
    "requests_resumed_total": 3,
    "deepinfer_generation_tokens_total": 150,
    "deepinfer_prompt_tokens_computed_total": 1000,
    "deepinfer_decode_seconds_total": 1.5,
    "deepinfer_decode_weight_bytes_total": 2_000_000_000,
    "deepinfer_decode_kv_bytes_total": 500_000_000,
    "deepinfer_inter_token_latency_seconds": {"count": 30, "sum": 1.5, "buckets": []},
    "deepinfer_stage_still_seconds": {"decode": 0.0, "offload": 4.2},
    "deepinfer_engine_deaths_total": 1,
}


def text(view: View) -> str:
    console = Console(file=StringIO(), width=140)
    console.print(view.frame(), highlight=False)
    return console.file.getvalue()


def snapshot(time: float, metrics: dict[str, Any], phase: str = "ready") -> dict[str, Any]:
    engine = ENGINE if metrics else {}
    return {"v": 1, "seq": 0, "time": time, "phase": phase, "engine": engine, "interval_s": 2.0, "metrics": metrics}


def test_a_frame_needs_two_snapshots_and_shows_rates_between_them():
    view = View()
    view.take("metrics", snapshot(10.0, BEFORE))
    assert view.frame() is None
    view.take("metrics", snapshot(12.0, NOW))
    shown = text(view)
    for words in (
        "ready  m  cpu  KV int8",
        "7 waiting  0 prefill  3 decode  0 swapping out  2 swapped  0 swapping in",
        "12 live requests  1 not read",
        "54 of 64 in use, 4 kept for reuse",
        "3.0 MiB of 8.0 MiB, 2 requests",
        "25.0 generated",
        "500.0 of prompts",
        "4.00 GB/s of weights  1.00 GB/s of KV",
        "- to the first token  25.0 ms between tokens",
        "█" * 25 + "░" * 5,
        "5 out  3 in",
        "decode ok  offload stands for 4 s",
        "1 of the engine",
    ):
        assert words in shown, shown


def test_nothing_is_made_up_while_there_is_no_engine():
    view = View()
    for time in (10.0, 11.0):
        view.take("metrics", snapshot(time, {}, "restarting"))
    shown = text(view)
    assert "restarting" in shown
    assert "unknown for this model" in shown
    assert "not heard of yet" in shown


def test_events_show_once_however_often_they_come_and_the_latest_stay():
    view = View()
    events = [{"v": 1, "seq": seq, "event": "restarting", "number": seq} for seq in range(9)]
    view.take("events", events[7])
    view.take("replay/x", {"events": events[:8]})
    view.take("events", events[8])
    for time in (1.0, 2.0):
        view.take("metrics", snapshot(time, NOW))
    shown = text(view)
    assert shown.count("#7 restarting") == 1
    assert "#8 restarting  number 8" in shown


def test_the_death_of_an_engine_stays_in_sight_however_often_requests_are_swapped():
    view = View()
    view.take("events", {"v": 1, "seq": 0, "event": "engine_died", "error": "it was killed"})
    for seq in range(1, 300):
        view.take("events", {"v": 1, "seq": seq, "event": ("preempted", "resumed", "swap")[seq % 3]})
    for time in (1.0, 2.0):
        view.take("metrics", snapshot(time, NOW))
    assert "#0 engine_died  error it was killed" in text(view)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"event": "stopped"}, "the daemon has stopped\n"),
        ({"event": "failed", "error": "no engine stays alive"}, "the daemon has failed: no engine stays alive\n"),
    ],
)
def test_when_the_daemon_ends_the_view_says_how(monkeypatch, capsys, last, words):
    told = [("metrics", snapshot(1.0, NOW)), ("events", {"v": 1, "seq": 0, **last})]
    monkeypatch.setattr("deepinfer.daemon.top.messages", lambda where: iter(told))
    show_top(Path("anywhere"), once=False)
    assert capsys.readouterr().out.endswith(words)
