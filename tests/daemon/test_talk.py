"""`generate` and `chat` as somebody uses them at a terminal, or in a pipe."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from daemon_process import CLI, Daemon, running

from deepinfer.clients import Client
from deepinfer.daemon.cli import main
from deepinfer.daemon.talk import next_message

SHORT = ["--max-new-tokens", "6", "--ignore-eos"]


@pytest.fixture(scope="module")
def daemon(tiny_path, tmp_path_factory) -> Iterator[Daemon]:
    with running(tiny_path, tmp_path_factory.mktemp("d", numbered=True) / "run", "--num-blocks", "64") as daemon:
        yield daemon


def say(daemon: Daemon, *arguments: str, input: str | bytes = "") -> Result:
    return CliRunner().invoke(main, [*arguments, "--runtime-dir", str(daemon.folder)], input=input)


def test_several_answers_are_printed_one_after_the_other(daemon):
    sampled = ["--temperature", "1", "--seed", "3"]
    with Client(daemon.folder) as client:
        due = client.complete("Once", max_new_tokens=6, ignore_eos=True, temperature=1.0, seed=3, n=3)
    told = say(daemon, "generate", "Once", "--n", "3", *SHORT, *sampled)
    assert told.exit_code == 0, told.output
    printed = "".join(f"[{number} of 3]\n{choice.text}\n" for number, choice in enumerate(due.choices, 1))
    assert told.stdout == printed
    assert "4 + 18 tokens" in told.stderr
    as_json = json.loads(say(daemon, "generate", "Once", "--n", "3", "--json", *SHORT, *sampled).stdout)
    assert [choice["text"] for choice in as_json["choices"]] == [choice.text for choice in due.choices]
    assert as_json["usage"]["completion_tokens"] == 18


@pytest.mark.parametrize("argument", [[], ["-"]], ids=["no prompt", "a dash"])
def test_a_prompt_may_be_piped_in(daemon, argument):
    by_argument = say(daemon, "generate", "Grüße\nan alle", *SHORT)
    piped = say(daemon, "generate", *argument, *SHORT, input="Grüße\nan alle")
    assert piped.exit_code == 0, piped.output
    assert piped.stdout == by_argument.stdout
    wrong = say(daemon, "generate", *argument, input=b"\xff\xfe")
    assert wrong.exit_code == 2
    assert "no UTF-8" in wrong.stderr


def test_a_talk_survives_a_message_that_is_refused_and_forgets_on_request(daemon):
    lines = ["first", "x" * 600, "second", "/clear", "/what", '"""two', 'lines"""', "/bye", "never said"]
    asked = []
    told = subprocess.run(
        [*CLI, "chat", "--system", "Be brief.", *SHORT, "--runtime-dir", str(daemon.folder)],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.returncode == 0, told.stderr
    with Client(daemon.folder) as client:
        history = [{"role": "system", "content": "Be brief."}]
        for line in ("first", "second", None, "two\nlines"):
            if line is None:
                history = history[:1]
                continue
            history.append({"role": "user", "content": line})
            asked.append(client.chat(history, max_new_tokens=6, ignore_eos=True).text)
            history.append({"role": "assistant", "content": asked[-1]})
    assert told.stdout == "".join(f"{answer}\n" for answer in asked)
    assert "error: context_exceeded" in told.stderr
    assert "there is no /what" in told.stderr


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([" hello "], "hello"),
        (['"""one line"""'], "one line"),
        (['"""', "a", "", "  b", '"""'], "\na\n\n  b\n"),
        (['"""a', 'b""" '], "a\nb"),
        (['"""a', "b"], "a\nb"),
        ([], None),
    ],
)
def test_a_message_is_a_line_or_what_stands_between_quotes(lines, said):
    left = iter(lines)
    assert next_message(lambda _: next(left, None)) == said
