"""The example in C, against a real daemon, and its msgpack reader against msgpack itself."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

import msgpack
import pytest
import zmq
from example_contract import Example, ExampleContract

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "clients" / "examples" / "c"
EVENTS = json.loads((HERE / "golden" / "events.json").read_text(encoding="utf-8"))
MALFORMED = "malformed"


def succeeds(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


def libzmq() -> list[str]:
    """What make must be told to find libzmq: nothing where it is installed, else the one inside pyzmq."""
    if succeeds("pkg-config", "--exists", "libzmq"):
        return []
    folder = Path(zmq.__file__).parent.parent / "pyzmq.libs"
    bundled = sorted(folder.glob("libzmq*.so*"))
    if not bundled:
        pytest.skip("there is no libzmq: neither libzmq3-dev (for pkg-config) nor one inside pyzmq")
    return [f"ZMQ_CFLAGS=-I{HERE / 'c'}", f"ZMQ_LIBS={bundled[0]} -Wl,-rpath,{folder}"]


@pytest.fixture(scope="module")
def compiler() -> str:
    for program in ("make", "cc"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    return "cc"


@pytest.fixture(scope="module")
def example(compiler, tmp_path_factory) -> Example:
    build = tmp_path_factory.mktemp("c")
    flags = "-O2 -Wall -Wextra -Werror"
    command = ["make", "-C", str(SOURCE), f"BUILD={build}", f"CFLAGS={flags}", *libzmq()]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return Example([str(build / "client")], [str(build / "metrics_subscriber")])


class TestCExample(ExampleContract):
    pass


@pytest.fixture(scope="module")
def printed(compiler, tmp_path_factory):
    """What the reader makes of messages: JSON, or `malformed`. With the sanitizers, where the compiler has them."""
    folder = tmp_path_factory.mktemp("mp")
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    if not (
        succeeds(compiler, *sanitizers, str(folder / "empty.c"), "-o", str(folder / "empty"))
        and succeeds(str(folder / "empty"))
    ):
        sanitizers = []
    program = folder / "print_events"
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", *sanitizers, f"-I{SOURCE}"]
    subprocess.run([compiler, *flags, str(HERE / "c" / "print_events.c"), "-o", str(program)], check=True)

    def read(messages: list[bytes]) -> list[str]:
        lines = "".join(f"{message.hex()}\n" for message in messages)
        ran = subprocess.run(
            [str(program)], input=lines, capture_output=True, encoding="utf-8", errors="replace", timeout=60
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.splitlines()

    return read


def test_the_c_reader_reads_every_golden_event(printed):
    read = printed([bytes.fromhex(event["hex"]) for event in EVENTS])
    assert [json.loads(line) for line in read] == [event["map"] for event in EVENTS]


def some_value(random: random.Random, depth: int):
    kind = random.randrange(9 if depth else 6)
    if kind == 0:
        return random.choice([None, True, False])
    if kind in (1, 2):
        return random.choice([-1, 1]) * random.getrandbits(random.choice([4, 5, 7, 8, 15, 16, 31, 32, 53]))
    if kind == 3:
        return random.uniform(-1e9, 1e9)
    if kind in (4, 5):
        alphabet = 'aé世🎈"\\\n\x01'
        return "".join(random.choices(alphabet, k=random.choice([0, 1, 5, 31, 32, 70, 300])))
    items = random.choice([0, 1, 3, 15, 16, 20]) if depth < 3 else 2
    if kind == 6:
        return [some_value(random, depth - 1) for _ in range(items)]
    return {f"key {i}": some_value(random, depth - 1) for i in range(items)}


def test_the_c_reader_reads_what_msgpack_writes(printed):
    rng = random.Random(5)
    values = [some_value(rng, 3) for _ in range(300)]
    messages = [message for value in values if len(message := msgpack.packb(value)) < 30_000]
    assert len(messages) > 200
    assert [json.loads(line) for line in printed(messages)] == [msgpack.unpackb(message) for message in messages]


def test_the_c_reader_refuses_what_is_cut_changed_or_too_deep_and_stays_within_its_bytes(printed):
    rng = random.Random(6)
    whole = [bytes.fromhex(event["hex"]) for event in EVENTS]
    cut = [message[:length] for message in whole for length in range(len(message))]
    assert set(printed(cut)) == {MALFORMED}
    assert set(printed([message + b"\0" for message in whole])) == {MALFORMED}
    assert (
        printed([b"\x91" * 1000 + b"\0", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc1"]) == [MALFORMED] * 4
    )
    noise = [rng.randbytes(rng.randrange(60)) for _ in range(2000)]
    changed = []
    for _ in range(2000):
        message = bytearray(rng.choice(whole))
        message[rng.randrange(len(message))] = rng.randrange(256)
        changed.append(bytes(message))
    assert len(printed(noise + changed)) == 4000
