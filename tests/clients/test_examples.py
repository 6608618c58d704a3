"""The example clients in Node and C against a real daemon: each does the same."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
import zmq
from daemon_process import Daemon, running
from examples import EXAMPLES, SECONDS, Example, c_example, faked, interrupted_after_first_text, node_example, started

from deepinfer.clients import Client
from deepinfer.clients.wire import pack_request
from deepinfer.daemon.keys import KeyStore

INTEGERS = [0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**53 - 1, -1]
CONTEXT = 65_536
ENDLESS = "60000"
"""New tokens: they take far longer than a client needs to cancel."""
UTF8_PROMPT = "Grüße, 世界 🎈"
GOLDEN = json.loads((Path(__file__).parent / "golden" / "requests.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return node_example(tmp_path_factory.mktemp("node"))


@pytest.fixture(scope="module")
def c(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return c_example(tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="module", params=["node", "c"])
def example(request: pytest.FixtureRequest) -> Example:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def endless_path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that never ends an answer by itself, with a context that takes seconds to fill."""
    folder = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(tiny_path, folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        # An id that the tokenizer does not have is never chosen.
        config |= {"eos_token_id": config.get("vocab_size", 264) - 1}
        if name == "config.json":
            config |= {"max_position_embeddings": CONTEXT}
        (folder / name).write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def endless_daemon(endless_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(endless_path, tmp_path_factory.mktemp("e") / "run", "--max-cache", str(CONTEXT)) as daemon:
        yield daemon


class CurveDaemon(NamedTuple):
    """`friend` is the pair of a client that is let in."""

    folder: Path
    connection: dict[str, Any]
    server_key: str
    friend: tuple[str, str]


@pytest.fixture(scope="module")
def curve_daemon(endless_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CurveDaemon]:
    folder = tmp_path_factory.mktemp("k")
    store = KeyStore(folder / "keys")
    store.new_server()
    public, secret = zmq.curve_keypair()
    store.allow("friend", public)
    options = ["--curve", "--endpoint", "tcp://127.0.0.1:*", "--keys-dir", str(store.folder), "--num-blocks", "64"]
    with running(endless_path, folder / "run", *options) as daemon:
        key = store.server().public.decode()
        yield CurveDaemon(daemon.folder, daemon.connection, key, (public.decode(), secret.decode()))


def test_it_writes_a_request_in_the_golden_bytes(example: Example):
    golden = next(golden for golden in GOLDEN if golden["name"] == "generate from text")
    fields = golden["client"]["fields"]
    ran = example.run(None, "bytes", fields["prompt"], str(fields["max_new_tokens"]))
    assert (ran.stdout.split(), ran.stderr) == (golden["frames"], "")


@pytest.mark.parametrize("length", [31, 32, 255, 256, 65_535, 65_536])
def test_it_writes_a_text_of_any_length_as_msgpack_does(example: Example, length: int):
    prompt = ("é" * length).encode()[:length].decode(errors="ignore").ljust(length, "x")
    ran = example.run(None, "bytes", prompt)
    assert bytes.fromhex(ran.stdout) == pack_request("generate", "a", {"prompt": prompt})[0]


@pytest.mark.parametrize("number", INTEGERS)
def test_it_writes_integers_of_every_size(example: Example, number: int):
    ran = example.run(None, "bytes", "x", str(number))
    assert msgpack.unpackb(bytes.fromhex(ran.stdout))["max_new_tokens"] == number


def test_it_streams_the_answer_that_python_gets(example: Example, endless_daemon):
    with Client(endless_daemon.folder) as client:
        expected = client.complete(UTF8_PROMPT, max_new_tokens=40)
    assert not expected.text.isascii()
    ran = example.run(endless_daemon.folder, "generate", UTF8_PROMPT, "40")
    assert (ran.stdout, ran.returncode) == (expected.text, 0)
    # The tokens of this model are bytes, so the prompt has arrived whole.
    assert ran.stderr == f"\nlength: {len(UTF8_PROMPT.encode())} prompt tokens, 40 new tokens\n"


def test_an_interrupt_cancels_and_the_stream_ends_in_order(example: Example, endless_daemon):
    command = [*example.client, "generate", "Hello", ENDLESS]
    text, said, code = interrupted_after_first_text(command, endless_daemon.folder)
    assert (said.split(":")[0], code) == ("\ncancelled", 0)
    assert 0 < int(said.split()[-3]) < int(ENDLESS)
    with Client(endless_daemon.folder) as client:
        expected = client.complete("Hello", max_new_tokens=20).text
    # The last character of each may have been cut in two.
    shorter, longer = sorted((text.rstrip("\ufffd"), expected.rstrip("\ufffd")), key=len)
    assert longer.startswith(shorter)


def test_a_refusal_is_shown_and_fails_the_program(example: Example, endless_daemon):
    ran = example.run(endless_daemon.folder, "generate", "Hello", "0")
    assert (ran.stdout, ran.returncode) == ("", 1)
    assert ran.stderr.startswith("error out_of_range: max_new_tokens = 0: out of range; allowed: ")


def test_it_asks_for_the_status(example: Example, endless_daemon):
    ran = example.run(endless_daemon.folder, "status")
    assert (ran.stderr, ran.returncode) == ("", 0)
    shown = json.loads(ran.stdout)
    with Client(endless_daemon.folder) as client:
        expected = client.status()
    assert shown.keys() == expected.keys()
    for constant in ("phase", "instance", "pid", "limits", "error"):
        assert shown[constant] == expected[constant]
    assert shown["engine"]["memory_plan"] == expected["engine"]["memory_plan"]


def test_it_goes_on_after_a_preemption_and_shows_what_ends_a_stream(example: Example, tmp_path: Path):
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
def test_it_notices_a_missing_event(example: Example, fault: str, tmp_path: Path):
    with faked(tmp_path):
        ran = example.run(tmp_path, "generate", fault)
    assert (ran.stderr, ran.returncode) == ("events of this stream are missing\n", 1)


def test_it_notices_that_the_daemon_is_gone(example: Example, tmp_path: Path):
    with faked(tmp_path) as server, started([*example.client, "generate", "hang abc"], tmp_path) as process:
        assert process.stdout.read(3) == b"abc"
        server.close()
        _, said = process.communicate(timeout=SECONDS)
    assert (said, process.returncode) == (b"the daemon is gone\n", 1)


def test_it_says_that_there_is_no_daemon(example: Example, tmp_path: Path):
    ran = example.run(tmp_path, "status")
    assert ran.returncode == 1
    assert f"no daemon is running: there is no connection file {tmp_path / 'daemon.json'}" in ran.stderr
    with faked(tmp_path):
        pass
    ran = example.run(tmp_path, "status")
    assert (ran.returncode, ran.stderr.startswith("nothing answers at tcp://127.0.0.1:")) == (1, True)


def test_it_connects_with_the_keys_of_the_connection_file_and_with_keys_of_its_own(
    example: Example, curve_daemon, tmp_path: Path
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


def test_its_subscriber_prints_metrics_and_finished_requests(example: Example, endless_daemon):
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


@pytest.mark.parametrize("name", ["metrics_subscriber.py", "node/metrics_subscriber.mjs", "c/metrics_subscriber.c"])
def test_a_subscriber_takes_at_most_twenty_lines_of_code(name):
    lines = (EXAMPLES / name).read_text().splitlines()
    assert 10 < sum(bool(line) and not line.startswith(('"""', "//", "/*")) for line in lines) <= 20


REQUESTS_AT_ONCE = """
import { connect } from './deepinfer.mjs'
const client = await connect()
const text = async (prompt) => {
  let joined = ''
  for await (const event of client.generate({ prompt, max_new_tokens: 30 })) joined += event.text ?? ''
  return joined
}
for await (const event of client.generate({ prompt: 'left', max_new_tokens: 60000 })) if (event.event === 'token') break
const [phase, ...texts] = await Promise.all([client.request('ping'), ...['x', 'yy', 'zzz'].map(text)])
const cancelled = async () => (await client.request('metrics')).deepinfer_request_success_total.cancelled ?? 0
while ((await cancelled()) <= Number(process.argv[2])) await new Promise((resolve) => setTimeout(resolve, 20))
console.log(JSON.stringify({ phase, texts }))
client.close()
"""


def test_one_node_client_has_many_requests_open_and_a_loop_that_is_left_cancels(node, endless_daemon):
    with Client(endless_daemon.folder) as client:
        expected = [client.complete(prompt, max_new_tokens=30).text for prompt in ("x", "yy", "zzz")]
        cancelled_before = client.metrics()["deepinfer_request_success_total"].get("cancelled", 0)
    script = Path(node.client[1]).with_name("many.mjs")
    script.write_text(REQUESTS_AT_ONCE)
    ran = Example(["node", str(script)], []).run(endless_daemon.folder, str(cancelled_before))
    assert ran.stderr == ""
    assert json.loads(ran.stdout) == {"phase": {"phase": "ready"}, "texts": expected}
