"""docs/protocol.md says what the code does: every field, limit, error code and byte."""

from __future__ import annotations

import json
import re
from pathlib import Path

from deepinfer.stages.protocol import ERROR_CODES, Limits
from deepinfer.stages.protocol_ops import OPS

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return re.split(r"^#{2,3} ", DOCUMENT.split(f" {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """Rows of the tables whose first cell is code."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    return [row for row in cells if row[0].startswith("`")]


def test_every_error_code_is_listed_with_its_meaning_and_whether_to_retry():
    documented = {row[0].strip("`"): (row[1] == "yes", row[2]) for row in rows(section("Errors"))}
    assert documented == {code: (error.retry, error.meaning) for code, error in ERROR_CODES.items()}


def test_every_limit_is_listed_with_its_default():
    documented = {row[0].strip("`"): int(row[1].replace(",", "")) for row in rows(section("Limits"))}
    assert documented == Limits().to_dict()


def test_every_field_of_generate_is_listed():
    assert [row[0].strip("`") for row in rows(section("`generate`"))] == list(OPS["generate"].parsers)


def test_every_one_answer_operation_is_listed_with_its_fields():
    documented = {row[0].strip("`"): row[1] for row in rows(section("One-answer operations"))}
    assert documented.keys() == OPS.keys() - {"generate", "cancel"}
    for op, text in documented.items():
        for field in OPS[op].parsers:
            assert f"`{field}`" in text, (op, field)


def test_every_byte_string_is_that_of_a_golden_message():
    golden = ROOT / "tests" / "clients" / "golden"
    requests = json.loads((golden / "requests.json").read_text(encoding="utf-8"))
    events = json.loads((golden / "events.json").read_text(encoding="utf-8"))
    known = {frame for request in requests for frame in request["frames"]} | {event["hex"] for event in events}
    shown = re.findall(r"```hex\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    assert len(shown) == 4
    for text in shown:
        assert "".join(text.split()) in known
