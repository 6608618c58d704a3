"""Daemons that are started and hit, by the stress command; and what that command does by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from deepinfer.daemon.cli import main
from deepinfer.daemon.setting import ConfigError
from deepinfer.daemon.stress.cycle_plan import KINDS, Plan, plan
from deepinfer.daemon.stress.cycles import stress_cycles
from deepinfer.daemon.stress.cycles_config import CyclesConfig
from deepinfer.daemon.stress.site import MARK, Site
from deepinfer.daemon.stress.verdict import conclude, earlier_runs


def hit(moment: str, victim: str, blow: str, detach: bool = False) -> Plan:
    return Plan(0, moment, victim, blow, detach, 0.5, 0.5)


@pytest.mark.slow
def test_daemons_that_are_hit_end_in_time_and_leave_nothing(tiny_path):
    wanted = {("freeze", "loading"), ("kill", "load"), ("twice", "swap")}
    first = next(number for number in range(len(KINDS)) if (plan(0, number).blow, plan(0, number).moment) in wanted)
    report = stress_cycles(CyclesConfig(model=str(tiny_path), first=first, cycles=2))
    assert {check["name"]: check["failures"] for check in report["checks"] if not check["passed"]} == {}
    assert report["cycles"] == 2


def test_every_kind_of_blow_comes_once_before_any_comes_again_and_is_the_same_for_a_seed():
    plans = [plan(3, number) for number in range(2 * len(KINDS))]
    for half in (plans[: len(KINDS)], plans[len(KINDS) :]):
        assert len({each.kind for each in half}) == len(KINDS) == 110
    assert plans == [plan(3, number) for number in range(2 * len(KINDS))]
    assert [each.kind for each in plans] != [plan(4, number).kind for number in range(2 * len(KINDS))]
    assert all(0 <= share < 1 for each in plans for share in (each.delay, each.pause))


def test_only_what_was_asked_for_is_done():
    config = CyclesConfig(victims="front", blows="term,twice", moments="load", starts="foreground")
    config.check()
    plans = [plan(0, number, config.kinds()) for number in range(20)]
    assert {(each.moment, each.victim, each.detach) for each in plans} == {("load", "front", False)}
    assert [sorted(each.blow for each in plans[place : place + 2]) for place in range(0, 20, 2)] == [
        ["term", "twice"]
    ] * 10
    assert CyclesConfig().kinds() == KINDS


def test_a_run_is_added_to_those_that_its_file_holds_and_to_no_other_file(tmp_path):
    output = tmp_path / "runs.json"
    for number in range(2):
        assert conclude({"passed": True, "checks": [], "number": number}, CyclesConfig(), output, append=True) == 0
    assert [run["number"] for run in json.loads(output.read_text())["runs"]] == [0, 1]
    for text in ('{"passed": true}', "", "[]"):
        output.write_text(text)
        with pytest.raises(ConfigError, match="--append"):
            earlier_runs(output)


@pytest.mark.parametrize(
    ("one", "codes", "ends"),
    [
        (hit("load", "front", "kill"), (-9,), {"length", "connection_lost"}),
        (hit("swap", "front", "freeze"), (-9,), {"length", "connection_lost"}),
        (hit("load", "front", "term"), (0,), {"length"}),
        (hit("load", "front", "twice"), (0,), {"length", "shutting_down"}),
        (hit("stopping", "front", "int"), (0,), {"length", "shutting_down"}),
        (hit("load", "engine", "stop"), (0,), {"length"}),
        (hit("stopping", "engine", "kill"), (0, 1), {"length", "shutting_down"}),
        (hit("loading", "front", "term"), (0, -15), {"length"}),
        (hit("loading", "engine", "kill"), (0, 1), {"length"}),
    ],
)
def test_what_may_become_of_a_daemon_depends_on_the_blow(one, codes, ends):
    assert one.exit_codes() == codes
    assert one.stream_ends(seconds=2.0, drain_s=30.0) == ends


def test_streams_may_be_cut_once_the_drain_is_over():
    assert "shutting_down" in hit("load", "front", "term").stream_ends(seconds=31.0, drain_s=30.0)


def test_a_site_finds_what_was_started_for_it_wherever_it_hangs_in_the_tree():
    with Site([]) as site:
        environment = {**os.environ, MARK: site._mark}
        program = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
        assert len(site.wait_empty(0.1)) == 1
        (site._temporary / "forgotten").touch()
        assert site.temporary_files() == ["forgotten"]
        site.kill_all()
        assert site.processes() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cycles", "0"], "cycles"),
        (["--new-tokens", "1"], "new_tokens"),
        (["--end-s", "0"], "end_s"),
        (["--moments", "load,later"], "loading, ready, load, swap, stopping"),
        (["--victims", "engine", "--blows", "freeze"], "none of them is for victims 'engine'"),
    ],
)
def test_wrong_options_are_named_before_anything_is_started(options, words):
    ended = CliRunner().invoke(main, ["stress", "cycles", *options])
    assert ended.exit_code == 78
    assert words in ended.output
