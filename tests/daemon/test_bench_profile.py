"""`bench profile` on a tiny checkpoint: every operator has its place, the parts are the whole. No time is asserted."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from deepinfer.daemon.bench.profile.account import (
    HAND_OVER,
    PROGRAMS,
    PYTHON,
    UNNAMED,
    Account,
    Operator,
    account_of,
    mean,
)
from deepinfer.daemon.bench.profile.config import ProfileBench
from deepinfer.daemon.bench.profile.costs import Cost, attention_cost
from deepinfer.daemon.bench.profile.labels import Call, Mark
from deepinfer.daemon.bench.profile.measure import SAMPLING, Passes
from deepinfer.daemon.bench.profile.replay import Item, Replay
from deepinfer.daemon.cli import main
from deepinfer.daemon.engine_host import EngineHost
from deepinfer.daemon.setting import ConfigError
from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.attention import AttentionBatch, AttentionSpec

LAYERS = 2
CALLS = {
    "embed": 1,
    "rms_norm": 1,
    "add_rms_norm": 2 * LAYERS,
    "head": 1,
    SAMPLING: 1,
    **dict.fromkeys(("qkv", "attention", "o", "gate_up", "silu_mul", "down"), LAYERS),
}
BATCH = AttentionBatch([0], [0], [[0]], [0, 1])


def test_the_command_tells_of_every_operator_of_every_layer_and_the_parts_are_the_whole(tiny_path, tmp_path):
    output = tmp_path / "profile.json"
    small = ["--concurrency", "1,3", "--context", "20", "--prefill", "24", "--rounds", "1", "--steps", "2"]
    result = CliRunner().invoke(
        main,
        ["bench", "profile", "--model", str(tiny_path), "--threads", "1", *small, "--output", str(output)],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    assert set(report["decode"]) == {"1", "3"}
    for found in (*report["decode"].values(), *report["prefill"].values()):
        assert {name: part["calls"] for name, part in found["operators"].items()} == CALLS
        parts = [*found["operators"].values(), *found["between"].values()]
        assert sum(part["ms"] for part in parts) == pytest.approx(found["timed_ms"])
        assert sum(part["share"] for part in parts) == pytest.approx(1)
        assert all(part["ms"] >= 0 for part in parts)
        assert found["operators_share"] == pytest.approx(sum(part["share"] for part in found["operators"].values()))
        assert found["plain_ms"] > 0
    assert all(found["served_ms"] > 0 for found in report["decode"].values())
    attention = report["decode"]["3"]["operators"]["attention"]
    stored = 3 * (ProfileBench(context=20).position + 1) * report["engine"]["block_bytes"] / 16
    assert attention["bytes"] > stored
    assert attention["bytes"] - stored < 10_000  # The queries that go in and what comes out.
    assert result.output.count("all of it") == 3


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_a_timed_pass_computes_what_the_engine_computes(tiny_path, dtype):
    bench = ProfileBench(
        model=str(tiny_path), dtype=dtype, threads=1, concurrency="2", context=20, prefill="24", daemon=False
    )
    host = EngineHost(bench.engine(), lambda stage, done, total: None)
    try:
        passes = host.compute.run(Passes, bench, host)
        rows = passes._steps[2]
        plain, timed = (host.compute.run(pair.decode.run, rows) for pair in (passes._plain, passes._timed))
        assert timed == plain
        assert all(outcome.item is not None for outcome in plain)
        account = host.compute.run(passes.timed_step, 2)
        assert (account.between.get(HAND_OVER) is not None) == passes.recorded
        assert UNNAMED not in account.operators
        assert account.operators["qkv"].calls == LAYERS
    finally:
        host.compute.close()


def test_what_no_operator_owns_is_told_and_everything_sums_up():
    items = [Item(10, 20, 9.0, 0), Item(22, 30, 4.0, 0), Item(40, 45, 5.0, -1), Item(50, 60, 5.0, 2)]
    marks = [Mark("a", 0, 1, lambda batch: Cost(100, 7)), Mark("b", 2, 4, lambda batch: Cost(1, 0))]
    account = account_of(100, [Call("c", 80, 90, Cost(5, 0))], Replay(5, 70, items, BATCH), marks)
    assert account.operators == {
        "a": Operator(1, 1, 10, 9.0, 100, 7),
        "b": Operator(1, 2, 15, 10.0, 1, 0),
        UNNAMED: Operator(1, 1, 8, 4.0, 0, 0),
        "c": Operator(1, 1, 10, 10, 5, 0),
    }
    assert account.between == {HAND_OVER: 2, PROGRAMS: 65 - 33 - 2, PYTHON: 100 - 65 - 10}
    assert account.named + sum(account.between.values()) == account.whole


def test_means_are_those_of_the_quieter_half_and_still_sum_up():
    accounts = [Account(whole, {"a": Operator(1, 1, whole - 1, 1, 4, 0)}, {PYTHON: 1}) for whole in (9, 3, 100, 5)]
    found = mean(accounts)
    assert (found.whole, found.operators["a"].time, found.operators["a"].bytes) == (4, 3, 4)
    assert found.named + sum(found.between.values()) == found.whole


def test_attention_must_read_each_sequence_once_but_multiplies_with_every_row():
    spec = AttentionSpec(2, 4, 2, 16, 0.25, windows=(0, 4))
    layout = resolve_kv_format("fp16").layout(2, 2, 16, 8)
    batch = AttentionBatch([6, 7, 8, 2], [0, 0, 0, 1], [[0, 1], [2, 3]], [0, 3, 4])
    token_bytes = 2 * 2 * 16 * 2
    cost = attention_cost(spec, layout)
    assert cost((0, torch.zeros(3)), None, batch) == Cost(token_bytes * (9 + 3) + 12, 4 * 4 * 16 * (7 + 8 + 9 + 3))
    # A window of four: positions 3 to 8 of the first sequence, 0 to 2 of the second.
    assert cost((1, torch.zeros(3)), None, batch) == Cost(token_bytes * (6 + 3) + 12, 4 * 4 * 16 * (3 * 4 + 3))


@pytest.mark.parametrize(("settings", "name"), [({"concurrency": "0"}, "concurrency"), ({"prefill": "a"}, "prefill")])
def test_rows_that_cannot_be_are_refused_by_name(settings, name):
    with pytest.raises(ConfigError, match=name):
        ProfileBench(**settings).check()
