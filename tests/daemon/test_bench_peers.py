"""`bench peers` with canned figures, small programs in place of peers, and once with a real daemon and a real peer.
Nothing here is about speed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from deepinfer.daemon.bench.load import TRIES, NeverTogether
from deepinfer.daemon.bench.peers import report
from deepinfer.daemon.bench.peers.config import Arm, PeersBench, pythons_of
from deepinfer.daemon.bench.peers.measure import OURS, WARM_TOKENS, Member, measure, rate_of
from deepinfer.daemon.bench.peers.process import PeerFailed, PeerProcess, Run
from deepinfer.daemon.bench.peers.roster import Peer, start_peer
from deepinfer.daemon.bench.rounds import noise, spread_of
from deepinfer.daemon.cli import main
from deepinfer.daemon.setting import ConfigError

PEER = """
import os, signal
class Fake:
    facts = {{"threads": {threads}}}
    jobs = 0
    def run(self, prompts, new_tokens):
        print("said by a library")
        self.jobs += 1
        if self.jobs == {dies_in}:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.jobs == {raises_in}:
            raise MemoryError("no room for " + str(len(prompts)))
        times = [0.5 + step for step in range(new_tokens)]
        return [times] * len(prompts), [sum(prompt) for prompt in prompts]
def load(model, threads, streams, tokens):
    return Fake()
"""
OPTIONS = {"model": "none", "threads": 1, "streams": 2, "tokens": 8}
DECODE, PREFILL = Arm("decode", 2, 4), Arm("prefill", 1, 8)


class Canned:
    """A token a second, the first after half of one."""

    def run(self, prompts, new_tokens):
        return Run([[0.5 + step for step in range(new_tokens)]] * len(prompts), [0] * len(prompts))


@pytest.fixture
def started(tmp_path):
    """Starts a peer that dies or raises in a job of this number."""
    alive = []

    def start(dies_in: int = 0, raises_in: int = 0) -> PeerProcess:
        adapter = tmp_path / f"fake_{dies_in}_{raises_in}.py"
        adapter.write_text(PEER.format(threads=1, dies_in=dies_in, raises_in=raises_in))
        alive.append(PeerProcess(sys.executable, adapter, OPTIONS, 60.0))
        return alive[-1]

    yield start
    for process in alive:
        process.close()


def test_a_peer_answers_jobs_whatever_it_prints_and_is_stopped_between_them(started):
    peer = started()
    assert peer.facts == {"threads": 1}
    assert peer.run([[1, 2], [3, 4]], 2) == Run([[0.5, 1.5]] * 2, [3, 7])
    process = psutil.Process(peer._process.pid)
    give_up = time.monotonic() + 10
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    assert peer.run([[5]], 1) == Run([[0.5]], [5])


def test_a_peer_that_cannot_be_imported_is_named_with_what_to_install(tmp_path):
    adapter = tmp_path / "adapter.py"
    adapter.write_text("import no_such_library\n")
    with pytest.raises(PeerFailed, match=r"No module named 'no_such_library' \(pip install some-package, or --peer-py"):
        start_peer(Peer("some", "some-package", adapter), sys.executable, OPTIONS, 60.0)
    with pytest.raises(PeerFailed, match=r"^no adapter$"):
        start_peer(Peer("some", "some-package"), sys.executable, OPTIONS, 60.0)
    with pytest.raises(PeerFailed, match="does not start: No such file"):
        start_peer(Peer("some", "some-package", adapter), str(tmp_path / "python"), OPTIONS, 60.0)


def test_a_peer_that_does_not_answer_is_given_up(tmp_path):
    adapter = tmp_path / "adapter.py"
    adapter.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(PeerFailed, match="no answer within 1 s"):
        PeerProcess(sys.executable, adapter, OPTIONS, 1.0)


def test_whoever_dies_in_the_middle_is_named_with_the_place_and_the_others_go_on(started):
    bench = PeersBench(concurrency="2", contexts="4", prefill="8", rounds=3, threads=1)
    members = {
        OURS: Member(Canned(), True),
        "killed": Member(started(dies_in=5), True),  # Two jobs to warm up, one round of two arms, and one decode.
        "raised": Member(started(raises_in=6), True),
        "lives": Member(started(), True),
    }
    said: list[str] = []
    measured = measure(bench, members, 264, said.append)
    assert measured.failed == {
        "killed": f"{DECODE.name}: killed by SIGKILL: said by a library",
        "raised": f"{PREFILL.name}: MemoryError: no room for 1",
    }
    assert sum("failed" in line for line in said) == 2
    counts = {arm: {name: len(values) for name, values in of.items()} for arm, of in measured.rates.items()}
    assert counts[DECODE.name] == {OURS: 3, "killed": 1, "raised": 2, "lives": 3}
    assert counts[PREFILL.name] == {OURS: 3, "killed": 1, "raised": 1, "lives": 3}
    assert set(measured.rates[DECODE.name]["lives"]) == {2.0}
    assert set(measured.rates[PREFILL.name]["lives"]) == {16.0}


@pytest.mark.parametrize(("apart", "failed"), [(1, False), (TRIES - 1, False), (TRIES, True)])
def test_streams_that_never_decoded_together_are_measured_again_until_it_is_clear_that_they_never_will(apart, failed):
    class Late(Canned):
        decoded = 0

        def run(self, prompts, new_tokens):
            run = super().run(prompts, new_tokens)
            if len(prompts) == 1 or new_tokens == WARM_TOKENS:
                return run
            self.decoded += 1
            late = [moment + 1000 for moment in run.arrivals[0]]
            return Run([run.arrivals[0], late], run.first) if self.decoded <= apart else run

    bench = PeersBench(concurrency="2", contexts="4", prefill="8", rounds=1, threads=1)
    measured = measure(bench, {OURS: Member(late := Late(), True)}, 264, lambda line: None)
    assert late.decoded == min(apart + 1, TRIES)
    assert measured.rates[DECODE.name][OURS] == ([] if failed else [2.0])
    assert (DECODE.name in measured.failed.get(OURS, "")) == failed


def test_decoding_counts_only_while_every_stream_decodes():
    arrivals = [[1.0, 2.0, 3.0, 4.0, 5.0], [3.0, 4.0, 5.0, 6.0, 7.0]]
    assert rate_of(DECODE, Run(arrivals, [0, 0])) == pytest.approx(4 / 2)
    with pytest.raises(NeverTogether, match="use more new tokens"):
        rate_of(DECODE, Run([[1.0, 2.0], [3.0, 4.0]], [0, 0]))


def test_ratios_are_medians_of_the_rounds_in_which_both_were_measured():
    rates = {"decode": {OURS: [100.0, 300.0, 200.0], "slow": [50.0, 100.0, 100.0], "died": [200.0], "none": []}}
    ratio = report.ratios(rates)
    assert ratio["decode"] == {
        "slow": spread_of([2.0, 2.0, 3.0]),
        "died": spread_of([0.5]),
    }
    assert report.medians(rates)["decode"] == {
        OURS: spread_of([100.0, 200.0, 300.0]),
        "slow": spread_of([50.0, 100.0, 100.0]),
        "died": spread_of([200.0]),
    }
    assert report.best(ratio) == {"decode": {"peer": "died", "ours_to_it": 0.5}}
    assert report.flat(ratio) == {"decode, ours to slow": ratio["decode"]["slow"], "decode, ours to died": (0.5,) * 5}


def test_goals_ask_more_of_few_streams_and_judge_nothing_without_a_peer():
    arms = [Arm("decode", 4, 64), Arm("decode", 8, 64), PREFILL]
    of_best = {arm.name: {"peer": "x", "ours_to_it": 1.1} for arm in arms[:2]}
    assert [goal.met for goal in report.goals(arms, of_best)] == [False, True, None]


def test_the_table_has_everybody_and_a_reason_for_whoever_is_missing(capsys):
    rates = {DECODE.name: {OURS: [100.0, 110.0], "fast": [200.0, 200.0], "died": []}, PREFILL.name: {OURS: [7.0]}}
    ratio = report.ratios(rates)
    facts = {"weights": "4 bits", "activations": "bf16", "kv_cache": "f16", "threads": 1}
    report.print_report(
        {
            "machine": {"cpu": "a processor"},
            "threads": 1,
            "model": "a model",
            "rounds": 2,
            "engine": {"kv_cache_dtype": "fp8"},
            "fairness": {OURS: facts, "fast": facts, "died": facts},
            "tokens_per_s": report.as_json(report.medians(rates), 2),
            "weights_gb_per_s": {DECODE.name: 12.3},
            "ratios": report.as_json(ratio, 3),
            "not_measured": {"died": "decode: killed by SIGKILL", "absent": "No module named 'absent'"},
            "first_tokens_as_ours": {"fast": {"same": 3, "prompts": 4}},
            "goals": [],
            "too_noisy": noise(report.flat(ratio), 2),
        }
    )
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith(DECODE.name)]
    assert [row[-4:] for row in rows[:1]] == [["105.0", "200.0", "-", "12.3"]]
    assert [row[-2:] for row in rows[1:]] == [["0.53", "-"], ["0.50", "-"], ["0.55", "-"]]
    assert "not measured: died: decode: killed by SIGKILL" in lines
    assert "not measured: absent: No module named 'absent'" in lines
    assert "first tokens as ours: fast: 3 of 4" in lines
    assert lines[-1].startswith(f"too noisy: {DECODE.name}, ours to fast lies between 0.5 and 0.55")


def test_a_real_daemon_and_transformers_are_measured_side_by_side(tiny_path, tmp_path):
    output = tmp_path / "peers.json"
    small = ["--concurrency", "1,2", "--contexts", "8", "--prefill", "32", "--new-tokens", "8", "--rounds", "1"]
    small += ["--threads", "1", "--peers", "transformers-fp32,llama.cpp,vllm"]
    result = CliRunner().invoke(
        main, ["bench", "peers", "--model", str(tiny_path), *small, "--output", str(output)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    found = json.loads(output.read_text())
    assert found["fairness"].keys() == {OURS, "transformers-fp32"}
    assert found["not_measured"].keys() == {"llama.cpp", "vllm"}
    assert found["not_measured"]["vllm"] == "no adapter"
    arms = ["decode c=1 at 8 tokens", "decode c=2 at 8 tokens", "prefill of 32"]
    assert list(found["ratios"]) == arms
    for arm in arms:
        ours, theirs = (found["tokens_per_s"][arm][name]["median"] for name in (OURS, "transformers-fp32"))
        assert found["ratios"][arm]["transformers-fp32"]["median"] == pytest.approx(ours / theirs, rel=0.01)
    assert found["first_tokens_as_ours"] == {"transformers-fp32": {"same": 2, "prompts": 2}}
    assert str(Path(sys.executable).parent) not in output.read_text()


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"peers": "nobody"}, "peers"), ({"contexts": "8,x"}, "contexts"), ({"concurrency": "0"}, "concurrency")],
)
def test_what_cannot_be_measured_is_refused_by_name(settings, name):
    with pytest.raises(ConfigError, match=name):
        PeersBench(**settings).check()


def test_a_python_of_a_peer_is_a_name_and_a_program():
    assert pythons_of([f"openvino={sys.executable}"]) == {"openvino": sys.executable}
    for wish in ("openvino", f"nobody={sys.executable}", "openvino=/no/such/python"):
        with pytest.raises(ConfigError, match="peer_python"):
            pythons_of([wish])
