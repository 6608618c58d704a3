"""The daemon as a user runs it: processes, signals, files, exit codes."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from typing import Any

import psutil
import pytest
from daemon_process import endings_of, nothing_left, run_cli, running, started

from deepinfer.clients import Client, DeepInferError, Preempted

PROMPT = "The quick brown fox"


def wait_gone(pids: list[int], seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < give_up, f"still alive: {pids}"
        time.sleep(0.02)


def test_start_answers_status_and_stop_leave_nothing_behind(tiny_path, folder):
    with running(tiny_path, folder, "--num-blocks", "64") as daemon:
        assert oct(folder.stat().st_mode & 0o777) == "0o700"
        assert oct((folder / "daemon.json").stat().st_mode & 0o777) == "0o600"
        pids = [daemon.process.pid, *(child.pid for child in daemon.children())]
        assert len(pids) == 2
        with Client(folder / "daemon.json") as client:
            assert len(client.complete(PROMPT, max_new_tokens=5, ignore_eos=True).ids) == 5
        answer = daemon.cli("generate", PROMPT, "--max-new-tokens", "4", "--ignore-eos")
        assert answer.returncode == 0
        assert "4 tokens" in answer.stderr
        shown = daemon.cli("status")
        assert shown.returncode == 0
        assert "64 of 64 free" in shown.stdout
        status = json.loads(daemon.cli("status", "--json").stdout)
        assert status["phase"] == "ready"
        assert status["engine"]["num_blocks"] == 64
        assert daemon.cli("stop").returncode == 0
        assert daemon.wait_end() == 0
        wait_gone(pids, 5)
        nothing_left(folder)
        assert daemon.cli("status").returncode == 3


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(tiny_path, folder):
    options = ["--num-blocks", "64", "--drain-s", "120"]
    with running(tiny_path, folder, *options) as daemon, Client(folder / "daemon.json") as client:
        stream = client.generate(PROMPT, max_new_tokens=450, ignore_eos=True)
        next(iter(stream))
        daemon.signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(DeepInferError) as refused:
            client.complete(PROMPT, max_new_tokens=1)
        assert refused.value.code == "shutting_down"
        assert stream.result().usage["completion_tokens"] == 450
        assert daemon.wait_end() == 0
        nothing_left(folder)


def test_sigterm_while_requests_are_swapped_out_lets_all_of_them_finish(tiny_path, folder):
    options = ["--num-blocks", "32", "--drain-s", "120"]  # How long it takes is the machine's affair.
    with running(tiny_path, folder, *options) as daemon, Client(folder / "daemon.json") as client:
        prompts = [f"{number} {PROMPT}" for number in range(6)]
        streams = [client.generate(prompt, max_new_tokens=400, ignore_eos=True) for prompt in prompts]
        swapped = threading.Event()

        def read(stream: Any) -> None:
            for event in stream:
                if isinstance(event, Preempted):
                    swapped.set()

        readers = [threading.Thread(target=read, args=(stream,), daemon=True) for stream in streams]
        for reader in readers:
            reader.start()
        assert swapped.wait(60)
        daemon.signal(signal.SIGTERM)
        give_up = time.monotonic() + 130
        for reader in readers:
            reader.join(max(0.0, give_up - time.monotonic()))
            assert not reader.is_alive()
        assert [stream.result().usage["completion_tokens"] for stream in streams] == [400] * 6
        assert daemon.wait_end() == 0
        nothing_left(folder)


def test_a_second_sigterm_cuts_and_every_stream_hears_of_it(tiny_path, folder):
    with running(tiny_path, folder, "--num-blocks", "512", "--max-running", "4") as daemon:
        with Client(folder / "daemon.json") as client:
            streams = [client.generate(PROMPT, max_new_tokens=450, ignore_eos=True) for _ in range(40)]
            next(iter(streams[0]))
            daemon.signal(signal.SIGTERM)
            time.sleep(0.3)
            daemon.signal(signal.SIGTERM)
            endings = endings_of(streams)
            assert set(endings) <= {"length", "shutting_down"}
            assert "shutting_down" in endings
        assert daemon.wait_end() == 0
        nothing_left(folder)


def test_a_killed_front_takes_the_engine_with_it_and_the_next_start_cleans_up(tiny_path, folder):
    with running(tiny_path, folder, "--num-blocks", "64") as daemon, Client(folder / "daemon.json") as client:
        engine_pids = [child.pid for child in daemon.children()]
        streams = [client.generate(PROMPT, max_new_tokens=480, ignore_eos=True) for _ in range(8)]
        next(iter(streams[0]))
        daemon.process.kill()
        daemon.process.wait()
        wait_gone(engine_pids, 5)
        assert daemon.cli("status").returncode == 1
    with running(tiny_path, folder, "--num-blocks", "64") as again:
        assert again.cli("status").returncode == 0


def test_a_second_daemon_in_the_same_folder_is_refused_and_the_first_goes_on(tiny_path, folder):
    with running(tiny_path, folder, "--num-blocks", "64") as daemon, started(tiny_path, folder) as second:
        assert second.wait_end() == 1
        assert "already running" in second.log.read_text()
        assert daemon.cli("generate", PROMPT, "--max-new-tokens", "2").returncode == 0


def test_stopping_while_the_model_loads_works(tiny_path, folder):
    with started(tiny_path, folder) as daemon:
        give_up = time.monotonic() + 30
        while not (folder / "control.sock").exists() and time.monotonic() < give_up:
            time.sleep(0.01)
        daemon.signal(signal.SIGINT)
        assert daemon.wait_end() == 0
        nothing_left(folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--block-size", "0"], "block_size is 0; it must be one of"),
        (["--kv-cache-dtype", "int3"], "fp8_e5m2"),
        (["--num-blocks", "8", "--max-cache", "128"], "say the same thing"),
        (["--endpoint", "tcp://0.0.0.0:5555"], "tcp://0.0.0.0:5555 is not a loopback address"),
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--num-blocks", "1000000000"], "--max-cache"),
        (["--threads", "9999"], "threads"),
        (["--block-size", "12"], "8, 16, 32, 64, 128"),
        (["--max-context", "1"], "at least 2"),
        (["--max-context", "1000000"], "at most 512"),
        (["--max-cpu-offload-mb", "4000000"], "for swapped requests"),
        (["--endpoint", "ipc://@abstract"], "absolute path"),
        (["--endpoint", "tcp://127.0.0.1:99999"], "65535"),
    ],
)
def test_settings_that_cannot_work_end_the_start_with_a_sentence_and_code_78(tiny_path, folder, options, words):
    with started(tiny_path, folder, *options) as daemon:
        assert daemon.wait_end(60) == 78
        log = daemon.log.read_text()
        assert words in log.replace("\n", " ")
        assert "Traceback" not in log
        nothing_left(folder)


def test_a_port_in_use_is_named(tiny_path, folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with started(tiny_path, folder, "--endpoint", f"tcp://127.0.0.1:{port}") as daemon:
            assert daemon.wait_end(60) == 78
            log = daemon.log.read_text()
            assert str(port) in log
            assert "Traceback" not in log


def test_a_runtime_folder_whose_socket_paths_are_too_long_is_refused(tiny_path, tmp_path):
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    deep.chmod(0o700)
    with started(tiny_path, deep) as daemon:
        assert daemon.wait_end() == 78
        assert "107" in daemon.log.read_text()
        nothing_left(deep)


def test_a_folder_that_others_can_enter_is_refused(tiny_path, tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with started(tiny_path, folder) as daemon:
        assert daemon.wait_end() == 78
        assert "0700" in daemon.log.read_text()


def test_detach_returns_when_the_daemon_is_ready_or_with_its_last_words(tiny_path, folder):
    options = ["start", "--detach", "--model", str(tiny_path), "--num-blocks", "32"]
    started = run_cli(*options, runtime_dir=folder, seconds=120)
    try:
        assert started.returncode == 0, started.stderr
        assert "32 blocks" in started.stdout
        assert run_cli("status", runtime_dir=folder).returncode == 0
        assert run_cli(*options, runtime_dir=folder).returncode == 1
    finally:
        assert run_cli("stop", runtime_dir=folder).returncode == 0
    nothing_left(folder)
    failed = run_cli(*options, "--kv-cache-dtype", "nonsense", runtime_dir=folder, seconds=120)
    assert failed.returncode == 78
    assert "nonsense" in failed.stderr


def test_a_client_that_goes_away_gives_its_blocks_back(tiny_path, folder):
    with running(tiny_path, folder, "--num-blocks", "64") as daemon:
        client = Client(folder / "daemon.json")
        stream = client.generate(PROMPT, max_new_tokens=480, ignore_eos=True)
        next(iter(stream))
        client.close()
        give_up = time.monotonic() + 10
        while json.loads(daemon.cli("status", "--json").stdout)["blocks"]["free"] != 64:
            assert time.monotonic() < give_up


def test_status_answers_quickly_while_everything_else_is_busy(tiny_path, folder):
    with (
        running(tiny_path, folder, "--num-blocks", "512") as daemon,
        Client(folder / "daemon.json") as client,
    ):
        streams = [client.generate(PROMPT * 20, max_new_tokens=100, ignore_eos=True) for _ in range(60)]
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(daemon.cli("status").returncode)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [0, 0, 0]
        for stream in streams:
            assert stream.result().usage["completion_tokens"] == 100


def test_a_folder_or_link_of_a_stranger_is_neither_read_nor_written(tiny_path, tmp_path):
    """The default folder can lie where anybody may create it first."""
    target = tmp_path / "precious"
    target.write_text("precious")
    planted = tmp_path / "planted"
    planted.mkdir()
    planted.chmod(0o755)  # Whatever the umask is.
    (planted / "daemon.log").symlink_to(target)
    (planted / "daemon.json").write_text(json.dumps({"endpoint": "ipc:///nowhere", "pid": 1}))
    link = tmp_path / "link"
    link.symlink_to(planted)
    for folder in (planted, link):
        for arguments in (
            ["start", "--detach", "--model", str(tiny_path)],
            ["generate", "secret"],
            ["status"],
            ["stop"],
        ):
            ended = run_cli(*arguments, runtime_dir=folder)
            assert ended.returncode == 78
            assert "runtime_dir" in ended.stderr
            assert "Traceback" not in ended.stderr
    assert target.read_text() == "precious"


@pytest.mark.parametrize("path", ["/dev/null/x", "/proc/nope"])
def test_a_runtime_folder_that_cannot_be_made_is_named(tiny_path, path):
    ended = run_cli("start", "--model", str(tiny_path), runtime_dir=path)
    assert ended.returncode == 78
    assert path in ended.stderr.replace("\n", "")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.6])
def test_sigterm_at_any_moment_of_the_start_leaves_nothing_behind(tiny_path, folder, seconds):
    with started(tiny_path, folder) as daemon:
        time.sleep(seconds)
        children = daemon.children()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait_end() in (0, -signal.SIGTERM)
        wait_gone([child.pid for child in children], 6)
        if daemon.process.returncode == 0:
            nothing_left(folder)


def test_an_engine_that_hangs_is_reported_and_cutting_it_still_ends_every_stream(tiny_path, folder):
    with running(tiny_path, folder, "--num-blocks", "64", "--drain-s", "0") as daemon:
        with Client(folder / "daemon.json") as client:
            stream = client.generate(PROMPT, max_new_tokens=480, ignore_eos=True)
            next(iter(stream))
            (engine,) = daemon.children()
            engine.suspend()
            daemon.signal(signal.SIGTERM)
            with pytest.raises(DeepInferError) as ended:
                stream.result()
            assert ended.value.code == "shutting_down"
        assert daemon.wait_end(30) == 1
        assert not engine.is_running()
        nothing_left(folder)


def test_streams_that_finish_while_admission_is_busy_keep_their_ends(tiny_path, folder):
    options = ["--num-blocks", "256", "--drain-s", "120"]  # How long it takes is the machine's affair.
    with running(tiny_path, folder, *options) as daemon, Client(folder / "daemon.json") as client:
        streams = [client.generate(PROMPT, max_new_tokens=200, ignore_eos=True) for _ in range(8)]
        next(iter(streams[0]))
        busy = [threading.Thread(target=client.tokenize, args=("word " * 380_000,), daemon=True) for _ in range(3)]
        for thread in busy:
            thread.start()
        daemon.signal(signal.SIGTERM)
        assert {stream.result().finish_reason for stream in streams} == {"length"}
        assert daemon.wait_end(120) == 0


def test_two_daemons_cannot_share_an_ipc_endpoint(tiny_path, folder, tmp_path):
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/shared.sock"
    with (
        running(tiny_path, folder, "--endpoint", endpoint),
        started(tiny_path, folder.parent / "two", "--endpoint", endpoint) as second,
    ):
        assert second.wait_end() == 1
        assert "already listening" in second.log.read_text()
