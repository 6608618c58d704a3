"""`bench concurrency` against a real daemon with a tiny model: it sends what it says, and its JSON is vllm's."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from daemon_process import Daemon, running

from deepinfer.clients import Client
from deepinfer.daemon.bench.concurrency_config import ConcurrencyBench
from deepinfer.daemon.bench.dataset import read_dataset
from deepinfer.daemon.bench.load import Seen
from deepinfer.daemon.bench.served import Asked, Pass, serve_result
from deepinfer.daemon.bench.workload import arrivals, random_jobs, random_lengths
from deepinfer.daemon.cli import main
from deepinfer.daemon.setting import ConfigError

OF_VLLM = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *("total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests", "rtfx"),
    *("mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p95_ttft_ms", "p99_ttft_ms"),
    *("mean_tpot_ms", "median_tpot_ms", "std_tpot_ms", "p95_tpot_ms", "p99_tpot_ms"),
    *("mean_itl_ms", "median_itl_ms", "std_itl_ms", "p95_itl_ms", "p99_itl_ms"),
    *("mean_e2el_ms", "median_e2el_ms", "std_e2el_ms", "p95_e2el_ms", "p99_e2el_ms"),
}
"""Of a result file of `vllm bench serve --save-result --metric-percentiles 95,99
--percentile-metrics ttft,tpot,itl,e2el`."""
DETAILS_OF_VLLM = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}
"""Of --save-detailed."""


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "concurrency", *arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def daemon(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tiny_path, tmp_path_factory.mktemp("d") / "run", "--threads", "1", "--max-cache", "1024") as daemon:
        yield daemon


def against(daemon: Daemon, tmp_path: Path, *arguments: str) -> tuple[dict, str]:
    output = tmp_path / "result.json"
    result = bench("--connect", str(daemon.folder), "--rounds", "1", *arguments, "--output", str(output))
    assert result.exit_code == 0, result.output
    return json.loads(output.read_text()), result.output


# --- the command ------------------------------------------------------------------------------------------------


def test_a_daemon_of_its_own_is_measured_and_the_json_has_the_keys_of_vllm(tiny_path, tmp_path):
    output = tmp_path / "sub" / "result.json"
    result = bench(
        *("--model", str(tiny_path), "--threads", "1", "--kv-cache-dtype", "int8", "--max-cache", "512"),
        *("--prefill-chunk-tokens", "16", "--no-prefix-cache", "--concurrency", "1,2", "--num-prompts", "3"),
        *("--max-new-tokens", "5", "--rounds", "2", "--output", str(output)),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    assert [point["max_concurrency"] for point in report["points"]] == [1, 2]
    for point in report["points"]:
        assert set(point) == OF_VLLM | {"deepinfer"}
        assert (point["completed"], point["failed"], point["num_prompts"]) == (6, 0, 6)
        assert (point["total_input_tokens"], point["total_output_tokens"]) == (6 * 64, 6 * 5)
        assert point["max_concurrent_requests"] >= point["max_concurrency"]
        assert point["deepinfer"]["gb_per_s"] > 0
        assert point["deepinfer"]["kv_cache_dtype"] == "int8"
    assert {"command", "machine", "versions", "date", "settings", "definitions"} <= set(report)
    assert len(report["model_sha256"]) == 64
    engine = report["engines"]["int8"]
    assert (engine["token_capacity"], engine["prefix_cache"], engine["threads"]) == (512, False, 1)
    assert "path" not in engine["checkpoint"]
    assert list(report["ratios"]) == ["int8: c=2 to c=1"]
    assert "tokens/s" in result.output
    assert "GB/s" in result.output
    assert (report["too_noisy"] or "another run should give the same ratios") in result.output


@pytest.mark.parametrize("in_turn", [False, True])
def test_formats_and_concurrencies_take_turns_in_every_round(daemon, tmp_path, monkeypatch, in_turn):
    """With --in-turn no two daemons are there at the same time."""
    told: list[str] = []

    @contextmanager
    def started(*options: str) -> Iterator[Client]:
        name = options[options.index("--kv-cache-dtype") + 1]
        told.append(f"start {name}")
        with Client(daemon.folder) as client:
            yield client
        told.append(f"stop {name}")

    def driven(client, jobs, starts, level, **fields):
        told.append(f"c={level}")
        return Pass([seen(0.0, [0.1, 0.2], 0.3)], 1.0)

    monkeypatch.setattr("deepinfer.daemon.bench.concurrency.started_daemon", started)
    monkeypatch.setattr("deepinfer.daemon.bench.concurrency.drive", driven)
    counted = dict.fromkeys(("decode_steps_total", "decode_context_tokens_total", "decode_seconds"), 0)
    monkeypatch.setattr("deepinfer.daemon.bench.concurrency.settled_counters", lambda client: counted)
    plot = tmp_path / "plot.png"
    turn = ("--in-turn",) if in_turn else ()
    result = bench("--kv-cache-dtype", "fp16,int8", "--concurrency", "1,2", "--rounds", "2", *turn, "--plot", str(plot))
    assert result.exit_code == 0, result.output
    begin, end = (["start fp16"], ["stop fp16"])
    passes = ["c=1", "c=2"]
    if in_turn:
        assert told == 2 * [*begin, *passes, *end, "start int8", *passes, "stop int8"]
    else:
        assert told == [*begin, "start int8", *4 * passes, "stop int8", *end]
    assert result.output.count("int8 to fp16, c=") == 2
    assert "another run should give the same ratios to within 5%" in result.output
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_running_daemon_is_measured_with_the_load_that_was_asked_for(daemon, tmp_path):
    load = ("--concurrency", "3", "--num-prompts", "6", "--input-len", "20", "--range-ratio", "0.5")
    report, _ = against(daemon, tmp_path, *load, "--max-new-tokens", "4", "--save-detailed")
    (point,) = report["points"]
    assert set(point) == OF_VLLM | DETAILS_OF_VLLM | {"deepinfer"}
    assert point["input_lens"] == random_lengths(6, 20, 0.5, 0.0, 0)
    assert point["output_lens"] == [4] * 6
    assert all(len(point[name]) == 6 for name in DETAILS_OF_VLLM)
    assert point["deepinfer"]["kv_cache_dtype"] == next(iter(report["engines"])) == "fp32"
    assert daemon.process.poll() is None, "it was left running"


def test_no_pass_finds_prompts_of_another_one_in_the_prefix_cache(daemon, tmp_path):
    for _ in range(2):
        report, _ = against(daemon, tmp_path, "--concurrency", "1,2", "--num-prompts", "2", "--max-new-tokens", "2")
        assert [point["deepinfer"]["cached_tokens"] for point in report["points"]] == [0, 0]


def test_prompts_of_a_pass_share_their_beginnings(daemon, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "the same beginning of every prompt, again and again"}) + "\n")
    load = ("--dataset", str(data), "--concurrency", "1", "--num-prompts", "2", "--max-new-tokens", "2")
    report, _ = against(daemon, tmp_path, *load)
    assert report["points"][0]["deepinfer"]["cached_tokens"] == 48


def test_a_data_set_says_what_is_sent_and_how_much_is_generated(daemon, tmp_path):
    data = tmp_path / "data.jsonl"
    lines = [
        {"prompt": "abcdef", "output_tokens": 3},
        {"prompt": [5, 6, 7, 8], "max_new_tokens": 2},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    data.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    report, _ = against(daemon, tmp_path, "--dataset", str(data), "--concurrency", "2", "--num-prompts", "6",
                        "--save-detailed")  # fmt: skip
    lengths = sorted(zip(report["points"][0]["input_lens"], report["points"][0]["output_lens"], strict=True))
    chat = len("<user>hi\n<assistant>")
    assert lengths == sorted([(6, 3), (4, 2), (chat, 64)] * 2)


def test_a_sharegpt_file_asks_for_as_many_tokens_as_were_answered(daemon, tmp_path):
    data = tmp_path / "share.json"
    turn = {"conversations": [{"from": "human", "value": "question"}, {"from": "gpt", "value": "answer"}]}
    data.write_text(json.dumps([turn, {"conversations": [{"from": "gpt", "value": "unasked"}]}]))
    report, printed = against(daemon, tmp_path, "--dataset", str(data), "--num-prompts", "1", "--concurrency", "1")
    (point,) = report["points"]
    assert (point["total_input_tokens"], point["total_output_tokens"]) == (len("question"), len("answer"))
    assert "1 conversations have no first question and answer" in printed


def test_refused_requests_are_counted_as_failed_and_the_reason_is_told(daemon, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "x" * 900}) + "\n" + json.dumps({"prompt": "fits"}) + "\n")
    report, printed = against(daemon, tmp_path, "--dataset", str(data), "--num-prompts", "4", "--concurrency", "2",
                              "--max-new-tokens", "3", "--save-detailed")  # fmt: skip
    (point,) = report["points"]
    assert (point["completed"], point["failed"], point["total_output_tokens"]) == (2, 2, 6)
    assert [bool(error) for error in point["errors"]] == [length == 0 for length in point["output_lens"]]
    assert "failed: " in printed


def test_nothing_served_is_a_failure(daemon):
    load = ("--input-len", "900", "--num-prompts", "1", "--concurrency", "1", "--rounds", "1")
    assert bench("--connect", str(daemon.folder), *load).exit_code == 1


# --- figures against plain references ---------------------------------------------------------------------------


def seen(sent: float, tokens: list[float], ended: float) -> Seen:
    return Seen(0, sent, tokens, ended=ended, done={"usage": {"prompt_tokens": 7, "cached_tokens": 0}})


def test_latencies_are_those_of_their_definitions():
    """A request of four tokens, two of which came together; one of one token; one that failed; all twice."""
    one = seen(10.0, [10.5, 10.7, 10.7, 11.3], 11.4)
    two = seen(10.2, [10.6], 10.6)
    bad = Seen(2, 10.3, [10.4], ended=10.5, error="refused")
    result = serve_result(Asked("m", 6, 3, math.inf), [Pass([one, two, bad], 2.0)] * 2, detailed=True)
    ttft, tpot, itl, e2el = [0.5, 0.4] * 2, [0.9 / 3] * 2, [0.2, 0.6] * 2, [1.4, 0.4] * 2
    for name, seconds in {"ttft": ttft, "tpot": tpot, "itl": itl, "e2el": e2el}.items():
        expected = [1000 * value for value in seconds]
        assert result[f"mean_{name}_ms"] == pytest.approx(statistics.fmean(expected))
        assert result[f"median_{name}_ms"] == pytest.approx(statistics.median(expected))
        assert result[f"std_{name}_ms"] == pytest.approx(statistics.pstdev(expected))
        for percent in (95, 99):
            cuts = statistics.quantiles(expected, n=100, method="inclusive")
            assert result[f"p{percent}_{name}_ms"] == pytest.approx(cuts[percent - 1])
    assert (result["duration"], result["completed"], result["failed"]) == (4.0, 4, 2)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (28, 10)
    assert (result["request_throughput"], result["output_throughput"]) == (1.0, 2.5)
    assert result["total_token_throughput"] == 9.5
    assert (result["max_output_tokens_per_s"], result["max_concurrent_requests"]) == (4, 2)
    assert result["request_rate"] == "inf"
    assert result["output_lens"] == [4, 1, 0] * 2


def test_a_load_without_one_success_has_zeros_as_vllm_writes_them():
    result = serve_result(Asked("m", 1, 1, 2.0), [Pass([Seen(ended=1.0, error="no")], 1.0)])
    assert (result["completed"], result["failed"], result["request_rate"]) == (0, 1, 2.0)
    assert result["p99_itl_ms"] == result["mean_ttft_ms"] == result["output_throughput"] == 0


def test_lengths_are_drawn_from_the_distribution_that_was_named():
    assert set(random_lengths(50, 64, 0.0, 0.0, 0)) == {64}
    even = random_lengths(4000, 100, 0.5, 0.0, 1)
    assert (min(even), max(even)) == (50, 150)
    assert statistics.fmean(even) == pytest.approx(100, abs=2)
    logs = np.log(random_lengths(4000, 1000, 0.0, 0.7, 2))
    assert (logs.mean(), logs.std()) == pytest.approx((math.log(1000), 0.7), abs=0.03)
    assert min(random_lengths(500, 1, 0.0, 3.0, 3)) == 1
    assert random_lengths(9, 100, 0.3, 0.0, 4) == random_lengths(9, 100, 0.3, 0.0, 4)
    assert random_lengths(9, 100, 0.3, 0.0, 4) != random_lengths(9, 100, 0.3, 0.0, 5)


def test_random_prompts_keep_to_the_vocabulary():
    jobs = random_jobs([300, 200], 4, 264, 0)
    assert [len(job.prompt) for job in jobs] == [300, 200]
    assert all(100 <= id < 264 for job in jobs for id in job.prompt)
    assert all(id < 50 for job in random_jobs([300], 4, 50, 0) for id in job.prompt)


def test_arrivals_are_a_poisson_process_of_that_rate():
    assert arrivals(3, math.inf, 0) == [0.0, 0.0, 0.0]
    moments = arrivals(4000, 5.0, 0)
    pauses = np.diff(moments)
    assert moments[0] == 0
    assert (pauses.mean(), pauses.std()) == pytest.approx((0.2, 0.2), rel=0.05)


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"concurrency": "1,x"}, "concurrency is '1,x'"),
        ({"concurrency": "0"}, "concurrency is '0'"),
        ({"concurrency": "2,2"}, "different integers"),
        ({"request_rate": 0.0}, "request_rate is 0.0"),
        ({"request_rate": math.nan}, "request_rate is nan"),
        ({"range_ratio": 1.0}, "range_ratio is 1.0"),
        ({"range_ratio": 0.5, "lognormal_sigma": 0.5}, "give only one"),
        ({"lognormal_sigma": -1.0}, "lognormal_sigma is -1.0"),
        ({"kv_cache_dtype": "fp16,int7"}, "int7"),
        ({"kv_cache_dtype": "fp16,fp16"}, "names a format twice"),
        ({"dataset": "file", "input_len": 3}, "input_len is 3, but dataset"),
        ({"connect": "x", "kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8', but connect"),
        ({"connect": "x", "prefix_cache": False}, "prefix_cache is False, but connect"),
        ({"num_prompts": 0}, "num_prompts is 0"),
        ({"rounds": 0}, "rounds is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, said):
    with pytest.raises(ConfigError, match=said):
        ConcurrencyBench(**settings).check()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\n{"prompt": }\n', "line 2"),
        ('{"prompt": "a"}\n["a"]\n', "line 2: a line is a map"),
        ('{"text": "a"}', "line 1: a line has either"),
        ('{"prompt": "a", "messages": []}', "line 1: a line has either"),
        ('{"prompt": ""}', "line 1: `prompt` is empty"),
        ('{"prompt": [1, "2"]}', "line 1: `prompt` is a list"),
        ('{"prompt": null}', "line 1: `prompt` is null"),
        ('{"messages": []}', "line 1: `messages` is empty"),
        ('{"messages": [{"role": "user"}]}', r"line 1: `messages\[0\]`"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"line 1: `messages\[0\]`"),
        ('{"prompt": "a", "max_new_tokens": 0}', "line 1: the number of tokens to generate is 0"),
        ('{"prompt": "a", "output_tokens": true}', "line 1: the number of tokens to generate is True"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "item 0: a conversation has a list"),
        ('[{"conversations": [{"from": "human"}]}]', r"item 0: `conversations\[0\]`"),
        ('[{"conversations": []}]', "holds no prompt"),
        ("\n\n", "holds no prompt"),
    ],
)
def test_a_data_set_with_a_bad_line_is_refused_by_its_place(tmp_path, text, said):
    file = tmp_path / "data"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_dataset(file)


def test_a_data_set_that_cannot_be_read_is_refused_before_a_daemon_is_started(tmp_path):
    missing = bench("--dataset", str(tmp_path / "none"), "--model", "no such model")
    assert missing.exit_code == 78
    assert "dataset: cannot read" in missing.output
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_dataset(tmp_path / "latin")


def test_a_picture_of_a_kind_that_nobody_draws_is_refused_at_once(tmp_path):
    result = bench("--plot", str(tmp_path / "plot.xyz"), "--model", "no such model")
    assert result.exit_code == 78
    assert "its ending must be one of" in result.output


def test_a_daemon_that_is_not_there_is_one_clear_line(tmp_path):
    result = bench("--connect", str(tmp_path))
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith(f"Error: connect is '{tmp_path}': no daemon is running")
