"""What every example client does, whatever its language. A test module gives the `program` that it runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgpack
import pytest
import zmq
from fake_server import FakeServer

from deepinfer.clients import Client
from deepinfer.clients.wire import pack_request

SECONDS = 60.0
INTEGERS = [0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**53 - 1, -1, -129, -(2**40)]
UTF8_PROMPT = "Grüße, 世界 🎈"
GOLDEN = json.loads((Path(__file__).parent / "golden" / "requests.json").read_text(encoding="utf-8"))


class Example(NamedTuple):
    """The two programs of an example, as words of a command."""

    client: list[str]
    subscriber: list[str]

    def run(self, folder: Path | None, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.client, *words], capture_output=True, encoding="utf-8", timeout=SECONDS, env=environment(folder)
        )


def environment(folder: Path | None) -> dict[str, str]:
    return {**os.environ, "DEEPINFER_RUNTIME_DIR": str(folder or "/nonexistent")}


@contextlib.contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(folder))
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def faked(folder: Path) -> Iterator[FakeServer]:
    """A fake daemon that can be found in `folder`."""
    with FakeServer() as server:
        (folder / "daemon.json").write_text(json.dumps({"endpoint": server.endpoint, "limits": {}}))
        yield server


def interrupted_after_first_text(command: list[str], folder: Path) -> tuple[str, str, int]:
    """The text, what was said beside it, and the exit code of a client that got SIGINT while it streamed."""
    with started(command, folder) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=SECONDS)
        return (first + rest).decode(), said.decode(), process.returncode


class ExampleContract:
    def test_it_writes_a_request_in_the_golden_bytes(self, example: Example):
        golden = next(golden for golden in GOLDEN if golden["name"] == "generate from text")
        fields = golden["client"]["fields"]
        ran = example.run(None, "bytes", fields["prompt"], str(fields["max_new_tokens"]))
        assert (ran.stdout.split(), ran.stderr) == (golden["frames"], "")

    @pytest.mark.parametrize("length", [1, 31, 32, 255, 256, 65_535, 65_536])
    def test_it_writes_a_text_of_any_length_as_msgpack_does(self, example: Example, length: int):
        prompt = ("é" * length).encode()[:length].decode(errors="ignore").ljust(length, "x")
        ran = example.run(None, "bytes", prompt)
        assert bytes.fromhex(ran.stdout) == pack_request("generate", "a", {"prompt": prompt})[0]

    @pytest.mark.parametrize(
        "number", [0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**53 - 1, -1, -(2**40)]
    )
    def test_it_writes_integers_of_every_size(self, example: Example, number: int):
        ran = example.run(None, "bytes", "x", str(number))
        assert msgpack.unpackb(bytes.fromhex(ran.stdout))["max_new_tokens"] == number

    def test_it_streams_the_answer_that_python_gets(self, example: Example, endless_daemon):
        with Client(endless_daemon.folder) as client:
            expected = client.complete(UTF8_PROMPT, max_new_tokens=40)
        assert not expected.text.isascii()
        ran = example.run(endless_daemon.folder, "generate", UTF8_PROMPT, "40")
        assert (ran.stdout, ran.returncode) == (expected.text, 0)
        # The tokens of this model are bytes, so the prompt has arrived whole.
        assert ran.stderr == f"\nlength: {len(UTF8_PROMPT.encode())} prompt tokens, 40 new tokens\n"

    def test_an_interrupt_cancels_and_the_stream_ends_in_order(self, example: Example, endless_daemon):
        command = [*example.client, "generate", "Hello", "8000"]
        text, said, code = interrupted_after_first_text(command, endless_daemon.folder)
        assert (said.split(":")[0], code) == ("\ncancelled", 0)
        with Client(endless_daemon.folder) as client:
            tokens = int(said.split()[-3])
            assert 0 < tokens < 8000
            whole = client.complete("Hello", max_new_tokens=tokens).text
        assert whole.startswith(text.rstrip("\ufffd"))  # The last character may have been cut in two.

    def test_a_refusal_is_shown_and_fails_the_program(self, example: Example, endless_daemon):
        ran = example.run(endless_daemon.folder, "generate", "Hello", "0")
        assert (ran.stdout, ran.returncode) == ("", 1)
        assert ran.stderr.startswith("error out_of_range: max_new_tokens = 0: out of range; allowed: ")

    def test_it_asks_for_the_status(self, example: Example, endless_daemon):
        ran = example.run(endless_daemon.folder, "status")
        assert (ran.stderr, ran.returncode) == ("", 0)
        shown = json.loads(ran.stdout)
        with Client(endless_daemon.folder) as client:
            expected = client.status()
        assert shown.keys() == expected.keys()
        for constant in ("phase", "instance", "pid", "limits", "error"):
            assert shown[constant] == expected[constant]
        assert shown["engine"]["memory_plan"] == expected["engine"]["memory_plan"]

    def test_it_goes_on_after_a_preemption_and_shows_what_ends_a_stream(self, example: Example, tmp_path: Path):
        with faked(tmp_path):
            paused = example.run(tmp_path, "generate", "pause 0")
            assert (paused.stdout, paused.returncode) == ("ab", 0)
            novel = example.run(tmp_path, "generate", "novel")
            assert (novel.stdout, novel.returncode) == ("a", 0)
            failed = example.run(tmp_path, "generate", "fail engine_failed")
            assert (failed.stdout, failed.stderr, failed.returncode) == ("a", "error engine_failed: it broke\n", 1)
            refused = example.run(tmp_path, "status")
            assert (refused.stderr, refused.returncode) == ("error not_ready: still loading\n", 1)

    @pytest.mark.parametrize("fault", ["skip", "miscount"])
    def test_it_notices_a_missing_event(self, example: Example, fault: str, tmp_path: Path):
        with faked(tmp_path):
            ran = example.run(tmp_path, "generate", fault)
        assert (ran.stderr, ran.returncode) == ("events of this stream are missing\n", 1)

    def test_it_notices_that_the_daemon_is_gone(self, example: Example, tmp_path: Path):
        with faked(tmp_path) as server, started([*example.client, "generate", "hang abc"], tmp_path) as process:
            assert process.stdout.read(3) == b"abc"
            server.close()
            _, said = process.communicate(timeout=SECONDS)
        assert (said, process.returncode) == (b"the daemon is gone\n", 1)

    def test_it_says_that_there_is_no_daemon(self, example: Example, tmp_path: Path):
        ran = example.run(tmp_path, "status")
        assert ran.returncode == 1
        assert f"no daemon is running: there is no connection file {tmp_path / 'daemon.json'}" in ran.stderr
        with faked(tmp_path):
            pass
        ran = example.run(tmp_path, "status")
        assert (ran.returncode, ran.stderr.startswith("nothing answers at tcp://127.0.0.1:")) == (1, True)

    def test_it_connects_with_the_keys_of_the_connection_file_and_with_keys_of_its_own(
        self, example: Example, curve_daemon, tmp_path: Path
    ):
        ran = example.run(curve_daemon.folder, "generate", UTF8_PROMPT, "5")
        assert (ran.stderr.split(":")[0], ran.returncode) == ("\nlength", 0)

        def asked(**curve: str) -> subprocess.CompletedProcess[str]:
            """As a client on another machine, whose connection file is written by hand."""
            content = {"endpoint": curve_daemon.connection["endpoint"], **({"curve": curve} if curve else {})}
            (tmp_path / "daemon.json").write_text(json.dumps(content))
            return example.run(tmp_path, "generate", UTF8_PROMPT, "5")

        friend = dict(zip(("public_key", "secret_key"), curve_daemon.friend, strict=True))
        stranger, server = ([key.decode() for key in zmq.curve_keypair()] for _ in range(2))
        right = {"server_key": curve_daemon.server_key, **friend}
        allowed = asked(**right)
        assert (allowed.stdout, allowed.stderr, allowed.returncode) == (ran.stdout, ran.stderr, 0)
        for wrong in (
            {**right, "public_key": stranger[0], "secret_key": stranger[1]},
            {**right, "server_key": server[0]},
            {},
        ):
            refused = asked(**wrong)
            assert (refused.stdout, refused.returncode) == ("", 1)
            assert "does not let this client in" in refused.stderr

    def test_its_subscriber_prints_metrics_and_finished_requests(self, example: Example, endless_daemon):
        def take(topic: str, printed) -> dict:
            for line in printed:
                name, _, message = line.decode().partition(" ")
                if name == topic:
                    return json.loads(message)
            raise AssertionError(f"the subscriber ended before there were {topic}")

        with started([*example.subscriber, "requests", "metrics"], endless_daemon.folder) as process:
            snapshot = take("metrics", process.stdout)
            assert snapshot["metrics"]["deepinfer_engine_up"] == 1
            with Client(endless_daemon.folder) as client:
                client.complete(UTF8_PROMPT, max_new_tokens=3)
            record = take("requests", process.stdout)
        assert (record["prompt_tokens"], record["completion_tokens"]) == (len(UTF8_PROMPT.encode()), 3)
        assert record["instance"] == endless_daemon.connection["instance"]
