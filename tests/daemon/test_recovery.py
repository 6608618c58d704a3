"""The engine process dies, of whatever: streams pause, and go on as if nothing had been."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from daemon_process import Daemon, nothing_left, running, started

from deepinfer.clients import Client, DeepInferError, Preempted, Resumed, Token
from deepinfer.daemon.commands import EXIT_HUNG, EXIT_READY, show_status
from deepinfer.daemon.config import DaemonConfig
from deepinfer.daemon.engine import Engine
from deepinfer.daemon.supervisor import RestartBudget, Supervisor
from deepinfer.daemon.topology import one_process
from deepinfer.stages.board import StatusBoard

PROMPT = "The quick brown fox"
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    (PROMPT, {"max_new_tokens": 300}),
    (PROMPT, {"max_new_tokens": 300, "temperature": 0.9, "seed": 5, "top_p": 0.9}),
    (PROMPT * 12, {"max_new_tokens": 200, "temperature": 1.0, "seed": 6, "repetition_penalty": 1.3}),
    ("Zwölf Boxkämpfer", {"max_new_tokens": 250, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logprobs": 2}),
    ("abc", {"max_new_tokens": 250, "temperature": 0.7, "seed": 7, "min_p": 0.05, "stream": False}),
    (PROMPT, {"max_new_tokens": 200, "temperature": 1.0, "seed": 8, "n": 3}),
]
ENGINE = ["--batch-invariant", "--num-blocks", "160", "--threads", "1", "--max-running", "2"]
"""Two at a time, so that whoever comes last is certainly not through when the first one begins."""


@pytest.fixture(scope="module")
def undisturbed(tiny_path):
    with Engine(tiny_path, batch_invariant=True, num_blocks=160, threads=1) as engine:
        return [engine.complete(prompt, ignore_eos=True, **fields) for prompt, fields in QUESTIONS]


class Listener(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, client: Client, prompt: str, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.stream = client.generate(prompt, ignore_eos=True, **fields)
        self.events: list[Any] = []
        self.first_token = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            for event in self.stream:
                self.events.append(event)
                if isinstance(event, Token):
                    self.first_token.set()
        except DeepInferError:
            pass  # `end` raises it again.
        self.first_token.set()

    def end(self) -> Any:
        self.join(60)
        assert not self.is_alive()
        return self.stream.result()

    def pauses(self) -> list[str]:
        return [type(event).__name__ for event in self.events if isinstance(event, Preempted | Resumed)]


def engine_of(daemon: Daemon) -> psutil.Process:
    (engine,) = daemon.children()
    return engine


def wait_for(condition: Any, what: str, seconds: float = 60) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"{what} did not come"
        time.sleep(0.02)


def wait_for_phase(client: Client, phase: str) -> None:
    wait_for(lambda: client.status()["phase"] == phase, phase)


def test_streams_of_a_killed_engine_go_on_where_they_were_also_during_a_drain(tiny_path, folder, undisturbed):
    options = [*ENGINE, "--drain-s", "120"]  # Another engine is started during the drain, however slow the machine is.
    with running(tiny_path, folder, *options) as daemon, Client(folder / "daemon.json") as client:
        sockets = len(list(folder.iterdir()))
        listeners = [Listener(client, prompt, **fields) for prompt, fields in QUESTIONS]
        others = [Listener(client, f"{number} {PROMPT}", max_new_tokens=400) for number in range(8)]
        cancelled = Listener(client, PROMPT, max_new_tokens=400)
        late = Listener(client, PROMPT, max_new_tokens=400, deadline_ms=1)
        listeners[0].first_token.wait(60)
        first = engine_of(daemon)
        first.kill()
        wait_for_phase(client, "restarting")
        cancelled.stream.cancel()
        assert cancelled.end().finish_reason == "cancelled"
        with pytest.raises(DeepInferError) as refused:
            late.end()
        assert refused.value.code == "deadline_exceeded"
        asked_meanwhile = Listener(client, QUESTIONS[1][0], **QUESTIONS[1][1])
        for listener, alone in zip([*listeners, asked_meanwhile], [*undisturbed, undisturbed[1]], strict=True):
            got = listener.end()
            assert [choice.ids for choice in got.choices] == [choice.ids for choice in alone.choices]
            assert got.text == alone.text
            assert got.logprobs == alone.logprobs
        assert [other.end().usage["completion_tokens"] for other in others] == [400] * 8
        assert others[-1].pauses() == ["Preempted", "Resumed"]
        assert [event.reason for event in others[-1].events if isinstance(event, Preempted)] == ["engine_restart"]
        assert others[-1].end().timings["parks"] == 1
        assert asked_meanwhile.pauses() == []
        status = client.status()
        assert status["phase"] == "ready"
        assert status["engine_deaths"] == 1
        assert "SIGKILL" in status["last_engine_death"]
        assert status["engine_pid"] == engine_of(daemon).pid != first.pid
        assert status["engine"]["num_blocks"] == 160
        wait_for(lambda: client.status()["blocks"]["free"] == 160, "every block")
        assert len(list(folder.iterdir())) == sockets
        others = [Listener(client, f"{number} {PROMPT}", max_new_tokens=400) for number in range(8)]
        finishing = Listener(client, QUESTIONS[0][0], **QUESTIONS[0][1])
        others[0].first_token.wait(60)
        engine_of(daemon).kill()
        wait_for_phase(client, "restarting")
        daemon.signal(signal.SIGTERM)
        assert finishing.end().ids == undisturbed[0].ids
        assert daemon.wait_end() == 0
        nothing_left(folder)


def test_engines_that_die_one_after_the_other_end_every_stream_and_the_daemon(tiny_path, folder):
    with running(tiny_path, folder, *ENGINE, "--max-restarts", "1") as daemon:
        with Client(folder / "daemon.json") as client:
            others = [Listener(client, f"{number} {PROMPT}", max_new_tokens=400) for number in range(8)]
            listener = Listener(client, PROMPT, max_new_tokens=400)
            others[0].first_token.wait(60)
            first = engine_of(daemon)
            first.kill()
            wait_for(lambda: daemon.children() not in ([], [first]), "another engine")
            engine_of(daemon).kill()
            with pytest.raises(DeepInferError) as ended:
                listener.end()
            assert ended.value.code == "engine_failed"
        assert daemon.wait_end() == 1
        assert "SIGKILL" in daemon.log.read_text()
        nothing_left(folder)


def test_sigterm_twice_while_an_engine_is_started_again_cuts(tiny_path, folder):
    with running(tiny_path, folder, *ENGINE) as daemon:
        with Client(folder / "daemon.json") as client:
            others = [Listener(client, f"{number} {PROMPT}", max_new_tokens=400) for number in range(8)]
            listener = Listener(client, PROMPT, max_new_tokens=400)
            others[0].first_token.wait(60)
            engine_of(daemon).kill()
            wait_for_phase(client, "restarting")
            daemon.signal(signal.SIGTERM)
            wait_for(lambda: "stopping when" in daemon.log.read_text(), "the drain")
            daemon.signal(signal.SIGTERM)
            with pytest.raises(DeepInferError) as ended:
                listener.end()
            assert ended.value.code == "shutting_down"
        assert daemon.wait_end() == 0
        nothing_left(folder)


def test_a_stopped_engine_is_named_then_killed_and_replaced_and_another_one_ends_with_its_front(
    tiny_path, folder, undisturbed
):
    with running(tiny_path, folder, *ENGINE, "--hang-timeout-s", "5") as daemon:
        with Client(folder / "daemon.json") as client:
            others = [Listener(client, f"{number} {PROMPT}", max_new_tokens=400) for number in range(8)]
            prompt, fields = QUESTIONS[0]
            listener = Listener(client, prompt, **fields)
            others[0].first_token.wait(60)
            first = engine_of(daemon)
            first.suspend()
            wait_for_phase(client, "hung")
            assert show_status(folder, as_json=True) == EXIT_HUNG
            assert client.status()["hung"] == "engine process"
            assert listener.end().ids == undisturbed[0].ids
            status = client.status()
            assert status["phase"] == "ready"
            assert "engine process had work and did not move for 5 s" in status["last_engine_death"]
            assert status["health"].keys() >= {"admission", "decode", "prefill", "offload", "compute"}
            assert not first.is_running()
            assert show_status(folder, as_json=True) == EXIT_READY
        assert "engine process has work and does not move" in daemon.log.read_text()
        second = engine_of(daemon)
        second.suspend()
        daemon.process.kill()
        daemon.process.wait()
        psutil.wait_procs([second], timeout=5)
        assert not second.is_running()


def test_an_engine_that_is_started_later_has_the_log_level_of_the_last_reload(monkeypatch, tmp_path):
    started, told = [], []
    fake = SimpleNamespace(
        pid=1,
        ended=lambda: 1,
        death=lambda: "dead",
        running=list,
        end=lambda: None,
        send_log_level=told.append,
    )
    monkeypatch.setattr("deepinfer.daemon.supervisor.EngineProcess", lambda config, _: started.append(config) or fake)
    board = StatusBoard({})
    board.summary = {"num_blocks": 8, "context": 128}
    board.ready_pid = fake.pid
    supervisor = Supervisor(DaemonConfig(), tmp_path, one_process(), board, lambda message: None)
    for level in ("info", "debug", "debug"):
        supervisor.set_log_level(level)
    supervisor.look()
    assert told == ["debug"]
    assert [config.log_level for config in started] == ["info", "debug"]


def test_an_engine_that_is_stopped_before_it_could_do_anything_ends_with_its_front(tiny_path, folder):
    with started(tiny_path, folder) as daemon:
        wait_for(daemon.children, "the engine")
        engine = engine_of(daemon)
        wait_for(lambda: os.getpgid(engine.pid) == engine.pid, "its process group")
        engine.suspend()
        # Only a stop that has arrived is seen when the front dies: on a busy machine it may come later.
        wait_for(lambda: engine.status() == psutil.STATUS_STOPPED, "the stop")
        daemon.process.kill()
        daemon.process.wait()
        _, alive = psutil.wait_procs([engine], timeout=5)
        for process in alive:
            process.kill()
        assert not alive


def test_a_row_of_restarts_ends_with_a_token_or_after_a_long_life():
    budget = RestartBudget(limit=2, window_s=60)
    assert [budget.allow(0, 1.0), budget.allow(0, 1.0), budget.allow(0, 1.0)] == [True, True, False]
    budget = RestartBudget(limit=2, window_s=60)
    assert [budget.allow(tokens, 1.0) for tokens in (1, 2, 3, 3, 3)] == [True, True, True, True, False]
    budget = RestartBudget(limit=1, window_s=60)
    assert [budget.allow(0, ready) for ready in (61.0, 61.0, 1.0)] == [True, True, False]
    assert not RestartBudget(limit=0, window_s=60).allow(5, 100.0)
