"""`bench capacity`, `slope`, `jitter` and `overhead` against real daemons with a tiny model. Nothing here is about
speed: what is measured must be what was asked for, and the arithmetic must be right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from daemon_process import Daemon, running
from tiny import MAX_CONTEXT

from deepinfer.clients import Client
from deepinfer.daemon.bench import load
from deepinfer.daemon.bench.capacity import number_of_requests, stored
from deepinfer.daemon.bench.capacity_config import CapacityBench
from deepinfer.daemon.bench.in_process import InProcess
from deepinfer.daemon.bench.jitter import jitter_of
from deepinfer.daemon.bench.jitter_config import JitterBench
from deepinfer.daemon.bench.lines import Line, Wins, in_words, least_squares, wins
from deepinfer.daemon.bench.load import Seen, step_together
from deepinfer.daemon.bench.overhead_config import OverheadBench
from deepinfer.daemon.bench.own_daemon import OwnDaemon
from deepinfer.daemon.bench.slope_config import SlopeBench
from deepinfer.daemon.cli import main
from deepinfer.daemon.engine import no_progress
from deepinfer.daemon.engine_host import EngineHost
from deepinfer.daemon.setting import ConfigError

BLOCKS = 30
PICTURE = b"\x89PNG\r\n\x1a\n"
ORIGIN = {"command", "machine", "versions", "date", "model", "model_sha256", "settings", "definitions"}


def run(name: str, model: Path, folder: Path, *arguments: str, plot: bool = True) -> tuple[dict, str]:
    """Of a command that goes well: its JSON and what it printed."""
    output, picture = folder / "sub" / "result.json", folder / "plot.png"
    more = ("--plot", str(picture)) if plot else ()
    command = ["bench", name, "--model", str(model), "--threads", "1", *arguments, "--output", str(output), *more]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert not plot or picture.read_bytes()[:8] == PICTURE
    report = json.loads(output.read_text())
    assert set(report) >= ORIGIN
    return report, result.output


@pytest.fixture(scope="module")
def daemon(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Real, and started once for all that can do with its pool."""
    options = ("--threads", "1", "--num-blocks", str(BLOCKS), "--no-prefix-cache")
    with running(tiny_path, tmp_path_factory.mktemp("d") / "run", *options) as daemon:
        yield daemon


@pytest.fixture
def lent(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Instead of a daemon of its own a bench gets that one. Here are the options that it would have started with."""
    asked: list[Sequence[str]] = []

    @contextmanager
    def started(*options: str) -> Iterator[Client]:
        asked.append(options)
        with Client(daemon.folder) as client:
            yield client

    for name in ("slope", "jitter", "overhead"):
        monkeypatch.setattr(f"deepinfer.daemon.bench.{name}.started_daemon", started)
    return asked


def test_benches_ask_for_daemons_that_start_would_start(tiny_path):
    for bench in (CapacityBench, SlopeBench, JitterBench, OverheadBench):
        options = bench(model=str(tiny_path), threads=1).options("int8")
        shown = CliRunner().invoke(main, ["config", "show", *options])
        assert shown.exit_code == 0, shown.output
        assert "int8" in shown.output


def test_a_bench_that_is_told_to_end_takes_its_daemon_with_it(monkeypatch):
    """The daemon has left its session, so nobody else would."""
    stopped: list[Path] = []

    def told(command: Sequence[str], **_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    started = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(load.subprocess, "run", lambda command, **_: started)
    monkeypatch.setattr(load, "Client", told)
    monkeypatch.setattr(load, "stop_daemon", lambda path, now: stopped.append(path))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, load.started_daemon():
        pytest.fail("it was told to end before it was connected")
    assert ended.value.code == 128 + signal.SIGTERM
    assert len(stopped) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def option(options: Sequence[str], name: str) -> str:
    return options[options.index(name) + 1]


# --- capacity ---------------------------------------------------------------------------------------------------


def test_a_pool_holds_every_token_that_the_plan_promised(tiny_path, tmp_path):
    report, printed = run("capacity", tiny_path, tmp_path, "--kv-cache-dtype", "int8", "--pool-mb", "1")
    (row,) = report["formats"].values()
    layers, heads, head_dim = 2, 2, 16
    assert row["bytes_per_token"] == layers * heads * 2 * (head_dim + 2)
    assert row["held_tokens"] == row["promised_tokens"] == row["allocated_tokens"] == 2**20 // (144 * 16) * 16
    assert (row["of_promised"], row["to_first"], row["kept"], row["first_end"]) == (1.0, 1.0, True, "kv_exhausted")
    assert row["requests"] * MAX_CONTEXT >= row["held_tokens"], "no request is longer than the model's context"
    assert "100.0%" in printed


@pytest.mark.parametrize("blocks", [3, 4, 11, 12, 100, 1000, 4099])
@pytest.mark.parametrize("longest", [64, 512, 4096])
def test_the_requests_that_fill_a_pool_fit_it_with_room_to_grow_and_can_fill_it(blocks, longest):
    longest = min(longest, 16 * blocks)
    count = number_of_requests(blocks, 16, longest, least=4)
    prompt = (blocks // count - 2) * 16
    assert prompt >= 16
    assert count * (prompt + 16) < blocks * 16
    if longest >= 512 or blocks < 5:
        assert count * longest >= blocks * 16
    some_room = count * longest * 3 // 4 >= blocks * 16
    assert some_room or count == blocks // 3, "as many as there is room for"


def test_the_newest_token_of_a_request_is_not_stored_yet():
    assert stored(Seen(tokens=[1.0]), 32) == 32
    assert stored(Seen(tokens=[1.0, 2.0, 3.0]), 32) == 34
    assert stored(Seen(), 32) == 0


def test_a_pool_too_small_for_a_request_is_refused_with_the_size_of_a_block(tiny_path, monkeypatch):
    monkeypatch.setattr("deepinfer.daemon.bench.capacity._plan", lambda options: {"block_bytes": 2**20})
    command = ["bench", "capacity", "--model", str(tiny_path), "--pool-mb", "2", "--kv-cache-dtype", "int8"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert "pool_mb is 2; with KV int8 a block of this model has 1,048,576 bytes" in result.output


# --- slope ------------------------------------------------------------------------------------------------------


def test_every_format_decodes_at_every_length_in_every_round(tiny_path, tmp_path, lent):
    size = ("--contexts", "40,120", "--max-new-tokens", "40", "--rounds", "2", "--concurrency", "2")
    report, printed = run("slope", tiny_path, tmp_path, "--kv-cache-dtype", "int8", *size)
    (row,) = report["formats"].values()
    assert list(row["step_ms"]) == ["40", "120"]
    assert all(step["min"] > 0 for step in row["step_ms"].values())
    assert report["contexts"] == [61, 141]
    one, two = (step["median"] for step in row["step_ms"].values())
    assert row["slope_us_per_1k_tokens"] == pytest.approx(1e6 * (two - one) / 80)
    assert row["intercept_ms"] == pytest.approx(one - 61 * (two - one) / 80)
    assert row["tokens_per_s"]["40"] == pytest.approx(2000 / one)
    assert "us/1k tokens" in printed
    assert option(lent[0], "--num-blocks") == str(2 * (7 + 12)), "all prompts stay in the prefix cache"
    assert report["too_noisy"] is None, "one format has nothing to be compared with"


def test_a_context_that_the_model_does_not_take_is_refused(tiny_path, monkeypatch):
    from deepinfer.daemon.bench.slope import _check_lengths

    status = {"x": {"engine": {"max_context": 512}}}
    _check_lengths(SlopeBench(contexts="100,480"), status)
    with pytest.raises(ConfigError, match="takes at most 480"):
        _check_lengths(SlopeBench(contexts="100,481"), status)


def test_lines_are_those_of_numpy():
    random = np.random.default_rng(0)
    x, y = np.arange(7.0) * 300, random.normal(size=7)
    line = least_squares(x, y)
    slope, intercept = np.polyfit(x, y, 1)
    assert (line.slope, line.intercept) == pytest.approx((slope, intercept))
    assert line.r2 == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)
    assert least_squares([1, 2, 3], [4, 4, 4]) == Line(4, 0, 1)


@pytest.mark.parametrize("seed", range(40))
def test_where_a_line_wins_it_lies_below_and_elsewhere_not(seed):
    random = np.random.default_rng(seed)
    ours, other = (Line(*random.integers(0, 4, 2).astype(float), 1.0) for _ in range(2))
    found = wins(ours, other)
    for x in np.arange(0, 8, 0.25) + 0.125:
        inside = found.begin is not None and x > found.begin and (found.end is None or x < found.end)
        assert inside == (ours.intercept + ours.slope * x < other.intercept + other.slope * x), (ours, other, x)


def test_a_break_even_is_told_in_words_and_marked_where_it_is_a_guess():
    assert in_words(Wins(0.0, None), 100) == "faster from the first token on"
    assert in_words(Wins(80.0, None), 100) == "faster from 80 tokens on"
    assert in_words(Wins(1234.0, None), 100) == "faster from 1,234 tokens on, which is longer than what was measured"
    assert in_words(Wins(0.0, 80.0), 100) == "faster only below 80 tokens"
    assert in_words(Wins(None, None), 100) == "never faster"


def test_a_step_is_measured_while_all_streams_decode():
    """From 2 to 6: four steps of the slow one and four of the other, two of which were read at once."""
    slow = Seen(tokens=[2.0, 3.0, 4.0, 5.0, 6.0])
    other = Seen(tokens=[0.0, 1.0, 2.0, 3.0, 5.0, 5.0, 6.0, 7.0])
    assert step_together([slow, other]) == pytest.approx(4 * 2 / 8)
    with pytest.raises(click.ClickException, match="ended before the last one began"):
        step_together([Seen(tokens=[0.0, 1.0]), Seen(tokens=[2.0, 3.0])])


# --- jitter -----------------------------------------------------------------------------------------------------


def test_requests_swap_when_all_are_sent_at_once_and_not_when_as_many_as_fit(tiny_path, tmp_path, lent):
    size = ("--requests", "6", "--fitting", "3", "--max-new-tokens", "96", "--rounds", "1")
    report, printed = run("jitter", tiny_path, tmp_path, *size)
    groups = report["groups"]
    assert report["swaps"]["as many as fit"] == 0
    assert report["swaps"]["all at once"] >= 1
    assert groups["as many as fit"]["requests"] == groups["all at once"]["requests"] == 6
    assert groups["moved"]["requests"] + groups["stayed"]["requests"] == 6
    assert groups["moved"]["requests"] >= 1
    longest = {name: group["itl_ms"]["longest"] for name, group in groups.items() if group["itl_ms"]}
    assert longest["all at once"] == max(longest["moved"], longest.get("stayed", 0.0))
    assert report["engine"]["num_blocks"] == BLOCKS == int(option(lent[0], "--num-blocks")) == 3 * 10
    assert printed.count("longest") == 2
    assert "use more --rounds" in printed


def test_jitter_figures_are_those_of_their_definitions():
    pauses = [0.01, 0.01, 0.02, 0.01, 0.5]
    moments = np.concatenate([[1.0], 1.0 + np.cumsum(pauses)]).tolist()
    one = Seen(0, 0.5, moments, ended=moments[-1], done={"usage": {}})
    found = jitter_of([one])
    assert found["tpot_ms"]["mean"] == found["tpot_ms"]["p99"] == pytest.approx(110)
    assert found["itl_ms"]["longest"] == pytest.approx(500)
    assert found["itl_ms"]["p50"] == pytest.approx(10)
    assert found["itl_ms"]["mean"] == pytest.approx(110)
    assert found["itl_ms"]["p95"] == pytest.approx(20 + 0.8 * 480)
    assert jitter_of([]) == {"requests": 0, "tpot_ms": None, "itl_ms": None}


# --- overhead ---------------------------------------------------------------------------------------------------


def test_the_same_steps_are_measured_over_sockets_and_in_one_process(tiny_path, tmp_path, lent):
    size = ("--concurrency", "3", "--max-new-tokens", "48", "--rounds", "2")
    report, printed = run("overhead", tiny_path, tmp_path, *size, plot=False)
    assert set(report["ms_per_step"]) == {"client", "stage", "run", "forward"}
    assert all(step["min"] > 0 for step in report["ms_per_step"].values())
    assert set(report["cpu_ms_per_step"]) == {"front", "engine", "this client"}
    assert report["goal"]["value"] == pytest.approx(1 - report["ratios"]["run to client"]["median"])
    assert "front, sockets and scheduling" in printed


@pytest.fixture(scope="module")
def engine(tiny_path):
    """Of the bench: the host that is never started."""
    bench = OverheadBench(model=str(tiny_path), threads=1, concurrency=2, input_len=20, max_new_tokens=8)
    host = EngineHost(bench.engine, no_progress)
    host.warm_up()
    yield bench, host
    host.close()


def test_steps_in_one_process_yield_the_tokens_that_the_engine_would(engine, tiny_path, monkeypatch):
    """And the second forward pass of a step changes nothing."""
    from reference import greedy_ids, load_reference

    bench, host = engine
    kept = []
    made = InProcess._requests

    def keeping(self, prompts, new_tokens):
        kept.extend(made(self, prompts, new_tokens))
        return kept

    monkeypatch.setattr(InProcess, "_requests", keeping)
    prompts = [list(range(1, 21)), list(range(60, 80))]
    seconds = InProcess(host).decode(prompts, bench.new_tokens, skip=2)
    assert seconds.run > 0
    assert seconds.forward > 0
    reference = load_reference(tiny_path)
    for prompt, request in zip(prompts, kept, strict=True):
        assert request.generated == greedy_ids(reference, prompt, bench.new_tokens)


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bench", "said"),
    [
        (CapacityBench(kv_cache_dtype="fp16,int9"), "int9"),
        (CapacityBench(pool_mb=-1), "pool_mb is -1"),
        (CapacityBench(requests=0), "requests is 0"),
        (SlopeBench(contexts="512"), "at least two different lengths"),
        (SlopeBench(contexts="512,512"), "at least two different lengths"),
        (SlopeBench(contexts="0,512"), "each at least 1"),
        (SlopeBench(contexts="1k,2k"), "must be numbers"),
        (JitterBench(kv_cache_dtype="fp16,int8"), "must be one format"),
        (JitterBench(requests=4, fitting=4), "fitting is 4; with 4 requests it must be at most 3"),
        (JitterBench(offload_unit="page"), "offload_unit is 'page'"),
        (OverheadBench(kv_cache_dtype="fp16,int8"), "must be one format"),
        (OverheadBench(concurrency=0), "concurrency is 0"),
        (OverheadBench(device="tpu"), "device is 'tpu'"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(bench: OwnDaemon, said):
    with pytest.raises(ConfigError, match=said):
        bench.check()


@pytest.mark.parametrize("name", ["capacity", "slope", "jitter", "overhead", "concurrency"])
def test_a_bad_setting_is_one_line_and_exit_code_78(name):
    result = CliRunner().invoke(main, ["bench", name, "--kv-cache-dtype", "int9"])
    assert result.exit_code == 78
    assert len(result.output.splitlines()) == 1
    assert result.output.startswith("error: kv_cache_dtype is 'int9'")
