"""Swaps by the dozen, on a tiny model: every answer is that of the solo run, and nothing is left behind."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import zmq
from click.testing import CliRunner

from deepinfer.clients.wire import pack_request
from deepinfer.daemon.cli import main
from deepinfer.daemon.config import ConfigError
from deepinfer.daemon.stress import checks as stress_checks
from deepinfer.daemon.stress.client import Drive
from deepinfer.daemon.stress.jobs import Job, Question, catalogue, jobs
from deepinfer.daemon.stress.swap import stress_format
from deepinfer.daemon.stress.swap_config import StressConfig, engine_settings
from deepinfer.stages.memory.arena import Copy, HostArena
from deepinfer.stages.memory.ledger import BlockLedger
from deepinfer.stages.runner import ModelRunner

FORMATS = ["auto", "fp16", "int8", "fp8", "e5m2"]


def stress(path: Any, kv_format: str = "auto", settings: dict[str, Any] | None = None, **options: Any) -> Any:
    """A report, after a run of two dozen requests that need three times the pool."""
    fields = {"requests": 24, "distinct": 8, "pause": 0.0, "max_cpu_offload_mb": 8, **options}
    config = StressConfig(model=str(path), **fields)
    config.check()
    # One thread: a team that waits for one another by spinning is slow where other processes want the cores too.
    return stress_format(config, kv_format, {"threads": 1, **(settings or {})})


def failed(report: Any) -> dict[str, list[str]]:
    return {check["name"]: check["failures"] for check in report["checks"] if not check["passed"]}


@pytest.fixture
def slow_steps(monkeypatch):
    """Steps of the tiny model take less time than a client's reaction; these take longer."""
    run = ModelRunner.run

    def slow_run(self: ModelRunner, spans: Any) -> Any:
        time.sleep(0.01)
        return run(self, spans)

    monkeypatch.setattr(ModelRunner, "run", slow_run)


# --- scenarios ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", ["auto", "int8", "fp8"])
def test_two_requests_that_each_need_the_pool_take_one_swap_and_one_resume_a_round(tiny_path, slow_steps, kv_format):
    report = stress(tiny_path, kv_format, scenario="smoke", num_blocks=3, clients=2, requests=10)
    assert failed(report) == {}
    assert report["requests"] == {"length": 10}
    counters = report["counters"]
    assert counters["requests_swapped_total"] == counters["requests_resumed_total"] == 5
    assert counters["requests_recomputed_total"] == counters["kv_cpu_offload_rejected_total"] == 0
    assert counters["kv_cpu_offload_bytes_total"] == counters["kv_cpu_reload_bytes_total"]
    assert report["latency"]["requests_moved"] == 5


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_random_arrivals_cancels_and_priorities_change_no_answer(tiny_path, kv_format, block_size, prefix_cache):
    report = stress(
        tiny_path,
        kv_format,
        {"prefix_cache": prefix_cache},
        seed=block_size,
        block_size=block_size,
        num_blocks=10,
        distinct=6,
        requests=16,
        new_tokens="4:20",
        cancel=0.25,
        priorities=3,
    )
    assert failed(report) == {}
    assert sum(report["requests"].values()) == 16
    assert report["counters"]["requests_swapped_total"] >= 1


@pytest.mark.parametrize("kv_format", FORMATS)
def test_parts_of_requests_are_swapped_under_random_load_and_change_no_answer(tiny_path, kv_format):
    report = stress(
        tiny_path,
        kv_format,
        {"verify_payloads": True, "residency_quantum": 1},
        offload_unit="block",
        slow_copies="0.3:0.005",
        failed_copies=0.05,
        cancel=0.25,
        priorities=2,
    )
    assert failed(report) == {}
    assert report["counters"]["kv_cpu_offload_blocks_total"] >= 1


@pytest.mark.parametrize(("preemption", "chosen"), [("recompute", ["recompute"]), ("auto", ["swap", "recompute"])])
def test_requests_are_computed_again_by_choice_and_say_the_same(tiny_path, preemption, chosen):
    report = stress(tiny_path, preemption=preemption, new_tokens="24:48")
    assert failed(report) == {}
    assert report["preemption"]["chosen"] in chosen
    assert (report["counters"]["requests_recomputed_total"] > 0) or preemption == "auto"


def test_slow_copies_change_no_answer(tiny_path):
    report = stress(tiny_path, slow_copies="0.5:0.02", cancel=0.25, priorities=2)
    assert failed(report) == {}
    assert report["faults"]["slow"] >= 1


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_failed_copies_change_no_answer(tiny_path, rate):
    report = stress(tiny_path, failed_copies=rate, cancel=0.1, requests=40)
    assert failed(report) == {}
    assert report["counters"]["kv_cpu_offload_failed_total"] >= 1
    if rate == 1.0:
        assert report["counters"]["requests_swapped_total"] == 0


def test_without_any_host_memory_everyone_finishes(tiny_path):
    report = stress(tiny_path, max_cpu_offload_mb=0)
    assert failed(report) == {}
    assert report["counters"]["requests_swapped_total"] == 0


def test_with_no_block_of_the_host_memory_left_every_swap_is_rejected_and_everyone_finishes(tiny_path):
    report = stress(tiny_path, host_blocks=0)
    assert failed(report) == {}
    assert report["counters"]["kv_cpu_offload_rejected_total"] >= 1
    assert report["counters"]["requests_swapped_total"] == 0


def test_with_one_block_of_host_memory_one_block_is_swapped_at_a_time(tiny_path, slow_steps):
    report = stress(tiny_path, host_blocks=1, num_blocks=2, request_blocks="1:2", new_tokens="8", requests=16)
    assert failed(report) == {}
    out = report["copies"]["out"]
    assert out["swaps"] == out["blocks"] >= 1
    assert report["counters"]["kv_cpu_offload_rejected_total"] >= 1


def test_requests_that_are_neither_swapped_nor_computed_again_may_end_with_what_they_have(tiny_path):
    load = {"host_blocks": 0, "new_tokens": "40:64", "request_blocks": "6:12"}
    strict = stress(tiny_path, preemption="swap-only", **load)
    assert list(failed(strict)) == ["everyone finishes"]
    assert failed(stress(tiny_path, preemption="swap-only", allow_exhausted=True, **load)) == {}


def test_requests_that_grow_side_by_side_fragment_the_pool_and_their_runs_are_copied_whole(tiny_path):
    report = stress(tiny_path, block_size=8, request_blocks="5:8", new_tokens="60:64", clients=4)
    assert failed(report) == {}
    assert_copies_are_runs(report)
    out = report["copies"]["out"]
    assert out["copies"] > out["swaps"], "the pool was not fragmented"
    assert out["copies"] < out["blocks"], "there was nothing to join"


def assert_copies_are_runs(report: Any) -> None:
    """One swap may by chance begin where the one before ended: that is no copy too many."""
    for way in (report["copies"]["out"], report["copies"]["in"]):
        assert way["copies"] <= way["runs_of_rows"] + way["swaps"]


def test_four_times_as_many_requests_as_fit_finish_as_in_fitting_waves(tiny_path):
    report = stress(tiny_path, num_blocks=8, request_blocks="4", clients=8, new_tokens="16:32", fitting=True)
    assert failed(report) == {}
    assert report["counters"]["requests_swapped_total"] >= 1
    assert report["fitting"]["clients"] == 2
    assert report["fitting"]["swaps"] == 0
    assert report["fitting"]["tokens_per_s"] > 0


# --- what the checks see: each of these must fail -----------------------------------------------------------------


def test_a_byte_that_changes_on_its_way_is_reported(tiny_path):
    report = stress(tiny_path, corrupt_copies=1.0)
    assert report["passed"] is False
    assert list(failed(report)) == ["answers equal the solo run"]


def test_blocks_that_do_not_come_back_are_reported(tiny_path, monkeypatch):
    release, calls = BlockLedger.release, []

    def leaky(self: BlockLedger, rid: int) -> int:
        calls.append(rid)
        return 0 if len(calls) == 12 else release(self, rid)

    monkeypatch.setattr(BlockLedger, "release", leaky)
    report = stress(tiny_path, clients=2, request_blocks="1:2", num_blocks=20)
    assert set(failed(report)) == {"every block is available"}


def test_host_memory_that_does_not_come_back_is_reported(tiny_path, monkeypatch):
    monkeypatch.setattr(HostArena, "give_back", lambda self, rows: None)
    monkeypatch.setattr(stress_checks, "SETTLE_SECONDS", 0.2)
    assert set(failed(stress(tiny_path))) == {"no host memory is held"}


def test_a_copy_for_every_row_is_more_than_the_runs_that_are_there(tiny_path, monkeypatch):
    def row_by_row(self: HostArena, blocks: list[int], rows: list[int]) -> list[Copy]:
        return [Copy(block, row, 1) for block, row in zip(blocks, rows, strict=True)]

    monkeypatch.setattr(HostArena, "plan", row_by_row)
    report = stress(tiny_path)
    with pytest.raises(AssertionError):
        assert_copies_are_runs(report)


def test_a_run_that_hangs_ends_and_says_which_requests_are_open(tiny_path, monkeypatch):
    monkeypatch.setattr(stress_checks, "SETTLE_SECONDS", 0.2)
    report = stress(tiny_path, slow_copies="1:1.2", stall_s=0.3)
    assert "open" in failed(report)["the run does not hang"][0]


def test_a_second_terminal_event_is_seen():
    """Against a peer that answers one request and ends it as often as it is told to."""
    assert strays(ends=1) == []
    assert strays(ends=2) == ["done of request 0 after its end"]


def strays(ends: int) -> list[str]:
    with zmq.Context() as context:
        with context.socket(zmq.ROUTER) as router:
            router.bind("inproc://peer")
            peer = threading.Thread(target=answer_one_request, args=(router, ends))
            peer.start()
            question = Question((1,), {"max_new_tokens": 1})
            drive = Drive(context, "inproc://peer", [question], 1, lambda outcome: "", lambda: True)
            drive.run(iter([Job(0, 0)]), until=float("inf"), stall_seconds=5)
            drive.close()
            peer.join()
        assert [outcome.reason for outcome in drive.outcomes] == ["length"]
        return drive.strays


def answer_one_request(router: zmq.Socket, ends: int) -> None:
    identity, *_ = router.recv_multipart()
    accepted = {"seq": 0, "event": "accepted", "prompt_tokens": 1, "model": "m", "seed": 0, "max_new_tokens": 1}
    timings = {"parks": 0, "longest_gap_s": 0.0, "swapped_s": 0.0}
    done = {"seq": 1, "event": "done", "events": 2, "finish_reason": "length", "usage": {}, "timings": timings}
    for event in (accepted, *[done] * ends):
        router.send_multipart([identity, *pack_request("", 0, event)])
    router.recv_multipart()
    router.send_multipart([identity, *pack_request("ping", "last", {"event": "reply"})])


# --- the command --------------------------------------------------------------------------------------------------


def invoke(path: Any, *options: str) -> Any:
    small = ["--requests", "12", "--distinct", "4", "--max-cpu-offload-mb", "8"]
    return CliRunner().invoke(main, ["stress", "swap", "--model", str(path), *small, *options])


def test_the_command_runs_every_format_and_writes_what_it_saw(tiny_path, tmp_path):
    output = tmp_path / "report.json"
    result = invoke(tiny_path, "--kv-cache-dtype", "fp8", "--kv-cache-dtype", "int8", "--output", str(output))
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    assert report["passed"] is True
    assert [run["kv_cache_dtype"] for run in report["runs"]] == ["fp8_e4m3", "int8"]
    assert result.output.count("answers equal the solo run") == 2


def test_the_command_exits_with_1_when_a_check_fails(tiny_path):
    result = invoke(tiny_path, "--corrupt-copies", "1", "--requests", "24")
    assert result.exit_code == 1
    assert "FAILED" in result.output


def test_the_command_passes_settings_to_the_engine_and_refuses_what_it_does_not_know(tiny_path):
    assert engine_settings(["max-parks=2", "prefix-cache=false"]) == {"max_parks": 2, "prefix_cache": False}
    with pytest.raises(ConfigError, match="num_blokcs"):
        engine_settings(["num_blokcs=3"])
    with pytest.raises(ConfigError, match="true or false"):
        engine_settings(["prefix-cache=yes"])
    assert invoke(tiny_path, "--set", "num_blocks=3").exit_code == 78
    assert invoke(tiny_path, "--slow-copies", "0.5").exit_code == 78
    assert invoke(tiny_path, "--set", "offload_unit=block").exit_code == 78
    assert invoke(tiny_path, "--offload-unit", "block", "--preemption", "auto").exit_code == 0
    result = invoke(tiny_path, "--request-blocks", "4:99")
    assert result.exit_code == 78
    assert "4:99" in result.stderr


def test_the_seed_alone_decides_what_is_asked():
    config = StressConfig(seed=3, cancel=0.5, priorities=4, requests=20)
    assert list(jobs(config)) == list(jobs(config))
    assert catalogue(config, 200, 512) == catalogue(config, 200, 512)
    other = StressConfig(seed=4, cancel=0.5, priorities=4, requests=20)
    assert list(jobs(config)) != list(jobs(other))
    for question in catalogue(config, 200, 100):
        assert question.stored < min(100, config.num_blocks * config.block_size + 1)
