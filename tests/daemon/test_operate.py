"""What an operator does to a running daemon: reload, drain, dump, logs, status, and what a service manager hears."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import termios
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from daemon_process import CLI, Daemon, endings_of, nothing_left, run_cli, running
from test_processes import wait_gone

from deepinfer.clients import AccessDeniedError, Client, DeepInferError
from deepinfer.daemon.commands import control
from deepinfer.daemon.keys import KeyStore, new_pair, public_key
from deepinfer.daemon.log import for_people
from deepinfer.daemon.notify import ServiceManager

SECRET = "correct horse battery staple"


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("d", numbered=True) / "run"


def until(condition, seconds: float = 30.0):
    """Whatever `condition` gives that is true."""
    give_up = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    return value


class FakeServiceManager:
    """Reads all the time, as a real one does: a datagram that finds the queue full is lost."""

    def __init__(self, address: str, listens: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.heard: list[str] = []
        self._changed = threading.Condition()
        if listens:
            threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while message := self.socket.recv(4096).decode():
                with self._changed:
                    self.heard.append(message)
                    self._changed.notify_all()

    def hear(self, word: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(word in message for message in self.heard), 60)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Operated(NamedTuple):
    daemon: Daemon
    manager: FakeServiceManager
    settings: Path
    keys: KeyStore

    @property
    def folder(self) -> Path:
        return self.daemon.folder


@pytest.fixture(scope="module")
def operated(tiny_path, tmp_path_factory):
    """One daemon for the tests that leave it running: with keys, a settings file, all logs, under a service manager."""
    place = tmp_path_factory.mktemp("d", numbered=True)
    keys = KeyStore(place / "keys")
    keys.new_server()
    settings = place / "settings.toml"
    settings.write_text('max_stops = 2\nnum_blocks = 64\nlog_level = "debug"\n')
    manager = FakeServiceManager(str(place / "notify"))
    patch = pytest.MonkeyPatch()
    patch.setenv("NOTIFY_SOCKET", str(place / "notify"))
    patch.setenv("WATCHDOG_USEC", "400000")
    options = ["--config", str(settings), "--curve", "--keys-dir", str(keys.folder), "--max-prompt-chars", "60"]
    with running(tiny_path, place / "run", *options) as daemon:
        patch.undo()
        yield Operated(daemon, manager, settings, keys)
    manager.close()


def test_the_log_is_json_lines_and_holds_no_prompt_unless_asked(operated):
    with Client(operated.folder) as client:
        client.complete(SECRET, max_new_tokens=2)
        client.chat([{"role": "user", "content": SECRET}], max_new_tokens=2)
        with pytest.raises(DeepInferError):
            client.complete(SECRET, temperature=99)
        log = operated.daemon.log
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        assert {"time", "level", "process", "logger", "message"} <= set(entries[0])
        ready = next(entry for entry in entries if entry["message"].startswith("ready after"))
        assert ready["endpoint"] == operated.daemon.connection["endpoint"]
        assert SECRET not in log.read_text()
        operated.settings.write_text(operated.settings.read_text() + "log_prompts = true\n")
        assert "log_prompts is now True" in operated.daemon.cli("reload").stdout
        until(lambda: client.complete(SECRET, max_new_tokens=2) and SECRET in log.read_text())


def logged(daemon: Daemon) -> set[tuple[str, str]]:
    """Process and message of every whole line of its log."""
    lines = daemon.log.read_text().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
    return {(entry["process"], entry["message"]) for entry in entries}


def test_no_process_looks_for_garbage_in_what_it_holds_for_good(operated):
    entries = [json.loads(line) for line in operated.daemon.log.read_text().splitlines()]
    spared = {each["process"]: int(each["message"].split()[0]) for each in entries if "left out of" in each["message"]}
    assert set(spared) == {"front", "engine"}
    assert min(spared.values()) > 10_000


def test_reload_takes_over_what_may_change_and_names_what_needs_a_restart(operated):
    daemon, path = operated.daemon, operated.settings
    with Client(operated.folder) as client:
        client.complete("x", stop=["a", "b"], max_new_tokens=1)
        path.write_text("max_stops = 1\nnum_blocks = 32\ndrain_s = 3\nmax_prompt_chars = 7\n")
        told = daemon.cli("reload")
        assert told.returncode == 0, told.stderr
        assert "max_stops is now 1" in told.stdout
        assert "drain_s is now 3" in told.stdout
        assert "num_blocks has changed, which needs a restart" in told.stdout
        assert "max_prompt_chars" not in told.stdout, "the flag still counts"
        until(lambda: daemon.connection["limits"]["max_stops"] == 1)
        until(lambda: ("engine", "log_level is now info") in logged(daemon))
        assert client.status()["limits"]["max_stops"] == 1
        with pytest.raises(DeepInferError) as refused:
            client.complete("x", stop=["a", "b"], max_new_tokens=1)
        assert refused.value.field == "stop"
        assert client.complete("x", max_new_tokens=2, ignore_eos=True).ids

        path.write_text("max_stops = 'many'\n")
        wrong = daemon.cli("reload")
        assert wrong.returncode == 2
        assert "max_stops is 'many'; it must be an integer" in wrong.stderr
        assert client.status()["limits"]["max_stops"] == 1


def test_a_client_that_is_allowed_later_comes_in_after_a_reload(operated, tmp_path):
    operated.settings.write_text("num_blocks = 64\n")
    late = new_pair(tmp_path, "late")
    keys = {"server_key": operated.keys.server().public.decode(), "key_file": late.secret}
    endpoint = operated.daemon.connection["endpoint"]
    for wrong in (keys, {}):
        with pytest.raises(AccessDeniedError):
            Client(endpoint, **wrong)
    operated.keys.allow("late", public_key(str(late.public)))
    assert "1 clients are allowed" in operated.daemon.cli("reload").stdout
    with Client(endpoint, **keys) as client:
        assert client.ping()["phase"] == "ready"


def test_dump_and_sigusr1_show_every_stack_and_disturb_nothing(operated):
    daemon = operated.daemon
    (engine,) = daemon.children()
    with Client(operated.folder) as client:
        stream = client.generate("x", max_new_tokens=300, ignore_eos=True)
        next(iter(stream))
        told = control(operated.folder, "dump")
        assert "thread stage-admission:" in told["front"]
        assert told["engine_pid"] == engine.pid
        until(lambda: "engine_process.py" in daemon.log.read_text())
        before = daemon.log.read_text().count("daemon/front.py")
        daemon.signal(signal.SIGUSR1)
        until(lambda: daemon.log.read_text().count("daemon/front.py") > before)
        assert len(stream.result().ids) == 300
    shown = daemon.cli("dump")
    assert shown.returncode == 0, shown.stderr
    assert "thread stage-control:" in shown.stdout


def test_a_service_manager_hears_of_start_life_reload_and_stop(operated):
    daemon, manager = operated.daemon, operated.manager
    manager.hear("READY=1")
    assert "WATCHDOG=1" not in manager.heard[0], "nobody lives before it is ready"
    (engine,) = daemon.children()
    assert "NOTIFY_SOCKET" not in engine.environ()
    for signals, words in (((), ["WATCHDOG=1"]), ((signal.SIGHUP,), ["RELOADING=1", "READY=1"])):
        manager.heard.clear()
        for number in signals:
            daemon.signal(number)
        for word in words:
            manager.hear(word)
    with Client(operated.folder) as client:
        stream = client.generate("x", max_new_tokens=480, ignore_eos=True)
        next(iter(stream))
        stopped = daemon.cli("stop", "--drain", "60")
        assert stopped.returncode == 0, stopped.stdout
        assert stream.result().finish_reason == "length"
    manager.hear("STOPPING=1")
    assert daemon.wait_end() == 0
    nothing_left(operated.folder)


def test_a_drain_cuts_what_still_runs_after_the_seconds_it_is_told(tiny_path, folder):
    with running(tiny_path, folder, "--num-blocks", "64") as daemon, Client(folder) as client:
        streams = [client.generate("x", max_new_tokens=480, ignore_eos=True) for _ in range(8)]
        next(iter(streams[-1]))
        assert control(folder, "drain", seconds=0)["drain_s"] == 0
        endings = endings_of(streams)
        assert "shutting_down" in endings
        assert set(endings) <= {"length", "shutting_down"}
        assert daemon.wait_end(60) == 0
        nothing_left(folder)


def test_status_says_by_its_exit_code_how_the_daemon_is(tiny_path, folder):
    assert run_cli("status", runtime_dir=folder).returncode == 3
    waited = run_cli("status", "--wait", "0", runtime_dir=folder)
    assert waited.returncode == 3
    daemon = Daemon(tiny_path, folder, "--num-blocks", "32")
    try:
        until(lambda: (folder / "control.sock").exists())
        loading = run_cli("status", "--json", runtime_dir=folder)
        assert (json.loads(loading.stdout)["phase"], loading.returncode) in (("loading", 3), ("ready", 0))
        waited = run_cli("status", "--wait", "90", runtime_dir=folder, seconds=120)
        assert waited.returncode == 0, waited.stdout
        assert "ready" in waited.stdout
        front = psutil.Process(daemon.process.pid)
        front.suspend()
        assert run_cli("status", runtime_dir=folder).returncode == 4
        front.resume()
        until(lambda: run_cli("status", runtime_dir=folder).returncode == 0)
        engine = [child.pid for child in daemon.children()]
    finally:
        daemon.process.kill()
        daemon.process.wait()
    wait_gone(engine, 10)
    dead = run_cli("status", runtime_dir=folder)
    assert dead.returncode == 1
    assert "left its files" in dead.stdout


def test_an_abstract_address_of_a_service_manager_is_understood():
    name = f"deepinfer-test-{os.getpid()}"
    fake = FakeServiceManager(f"\0{name}")
    manager = ServiceManager({"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": "1000000"})
    manager.ready("here")
    fake.hear("STATUS=here")
    manager.stopping()
    manager.stopping()
    manager.alive()
    fake.hear("WATCHDOG=1")
    assert fake.heard.count("STOPPING=1") == 1
    fake.close()


def test_a_service_manager_that_does_not_read_holds_up_nobody(tmp_path):
    fake = FakeServiceManager(str(tmp_path / "notify"), listens=False)
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    for number in range(2000):
        manager.ready(str(number))
    assert b"STATUS=0" in fake.socket.recv(4096)
    fake.close()


def test_without_a_service_manager_or_with_a_dead_one_nothing_happens(tmp_path):
    for environ in ({}, {"NOTIFY_SOCKET": str(tmp_path / "absent"), "WATCHDOG_USEC": "1"}):
        manager = ServiceManager(environ)
        assert environ == {}
        for say in (lambda manager=manager: manager.ready("x"), manager.alive, manager.reloading, manager.stopping):
            say()


def test_on_a_terminal_it_speaks_to_people_and_ends_when_the_terminal_goes(tiny_path, folder):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    command = [*CLI, "start", "--model", str(tiny_path), "--runtime-dir", str(folder), "--num-blocks", "32"]
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen(command, **streams, env={**os.environ, "TERM": "xterm"}, start_new_session=True)
    os.close(theirs)
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # The other side has closed it.
            while chunk := os.read(ours, 4096):
                shown.extend(chunk)

    reading = threading.Thread(target=read)
    reading.start()
    try:
        until(lambda: b"connection file" in shown, 90)
        assert b"32 blocks" in shown
        assert b'"level"' not in shown
        log_lines = [line for line in re.split(rb"[\r\n]+", bytes(shown)) if b" engine INFO " in line]
        assert log_lines
        assert all(re.match(rb"\x1b\[2K\d{4}-", line) for line in log_lines), "written behind a bar"
        without_colours = re.sub(rb"\x1b\[[0-9;]*m", b"", bytes(shown))
        assert b"compiling kernels" in without_colours
        assert not re.search(rb"compiling kernels[^\r\n]*(MiB|bytes)", without_colours)
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        reading.join()
        os.close(ours)
    nothing_left(folder)


def test_logs_shows_and_follows_the_log_of_a_detached_daemon(tiny_path, folder):
    nothing = run_cli("logs", runtime_dir=folder)
    assert nothing.returncode == 3
    assert "there is no log" in nothing.stderr
    options = ["start", "--detach", "--model", str(tiny_path), "--num-blocks", "32"]
    started = run_cli(*options, runtime_dir=folder, seconds=120)
    assert started.returncode == 0, started.stderr
    assert "32 blocks" in started.stdout
    followed = {}

    def follow() -> None:
        followed["ended"] = run_cli("logs", "--follow", runtime_dir=folder, seconds=90)

    following = threading.Thread(target=follow)
    following.start()
    assert "ready after" in run_cli("logs", runtime_dir=folder).stdout
    assert run_cli("logs", "--lines", "1", "--raw", runtime_dir=folder).stdout.count("\n") == 1
    assert run_cli("stop", runtime_dir=folder).returncode == 0
    following.join()
    assert followed["ended"].returncode == 0
    assert "stopping" in followed["ended"].stdout


def test_a_line_of_the_log_is_shown_as_a_sentence():
    line = json.dumps({"time": "T", "process": "front", "level": "info", "message": "hello", "x": 1})
    assert for_people(line) == "T front info: hello"
    for other in ("Traceback (most recent call last):", "[1]", '"x"', "{}", "{"):
        assert for_people(other) == other
