"""The msgpack reader of the C example against msgpack itself."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest
from examples import EXAMPLES, STAND_IN, require, succeeds

EVENTS = json.loads((Path(__file__).parent / "golden" / "events.json").read_text(encoding="utf-8"))
MALFORMED = "malformed"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[bytes]], list[str]]:
    """What the reader makes of messages: JSON, or `malformed`. With the sanitizers, where the compiler has them."""
    require("cc")
    folder = tmp_path_factory.mktemp("mp")
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    if not (
        succeeds("cc", *sanitizers, str(folder / "empty.c"), "-o", str(folder / "empty"))
        and succeeds(str(folder / "empty"))
    ):
        sanitizers = []
    program = folder / "print_events"
    # Without -O0 a read whose value is not used is gone before the sanitizer can see it.
    flags = ["-std=c11", "-O0", "-Wall", "-Wextra", "-Werror", *sanitizers, f"-I{EXAMPLES / 'c'}"]
    subprocess.run(["cc", *flags, str(STAND_IN / "print_events.c"), "-o", str(program)], check=True)

    def read(messages: list[bytes]) -> list[str]:
        lines = "".join(f"{message.hex()}\n" for message in messages)
        ran = subprocess.run(
            [str(program)], input=lines, capture_output=True, encoding="utf-8", errors="replace", timeout=60
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.split("\n")[:-1]

    return read


def test_the_c_reader_reads_every_golden_event(printed):
    read = printed([bytes.fromhex(event["hex"]) for event in EVENTS])
    assert [json.loads(line) for line in read] == [event["map"] for event in EVENTS]


def some_value(rng: random.Random, depth: int):
    kind = rng.randrange(9 if depth else 6)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind in (1, 2):
        return rng.choice([-1, 1]) * rng.getrandbits(rng.choice([4, 5, 7, 8, 15, 16, 31, 32, 53]))
    if kind == 3:
        return rng.uniform(-1e9, 1e9)
    if kind in (4, 5):
        alphabet = 'aé世🎈"\\\n\x01'
        return "".join(rng.choices(alphabet, k=rng.choice([0, 1, 5, 31, 32, 70, 300])))
    items = rng.choice([0, 1, 3, 15, 16, 20]) if depth < 3 else 2
    if kind == 6:
        return [some_value(rng, depth - 1) for _ in range(items)]
    return {f"key {i}": some_value(rng, depth - 1) for i in range(items)}


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
    hostile = [b"\x91" * 1000 + b"\0", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc1", b""]
    assert printed(hostile) == [MALFORMED] * len(hostile)
    noise = [rng.randbytes(rng.randrange(60)) for _ in range(2000)]
    changed = []
    for _ in range(2000):
        message = bytearray(rng.choice(whole))
        message[rng.randrange(len(message))] = rng.randrange(256)
        changed.append(bytes(message))
    read = printed(noise + changed)
    assert len(read) == 4000
    accepted = [message for message, line in zip(noise + changed, read, strict=True) if line != MALFORMED]
    assert len(accepted) > 500
    for message in accepted:  # Raises where the message does not end as it should.
        msgpack.unpackb(message, raw=True, strict_map_key=False, object_pairs_hook=list)
