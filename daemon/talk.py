"""`generate` and `chat`: answers that are printed as they come."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from deepinfer.clients import Client, Completion, DeepInferError
from deepinfer.clients.discovery import Connection
from deepinfer.clients.errors import AccessDeniedError, ClientClosedError, NoDaemonError
from deepinfer.daemon.commands import EXIT_FAILED, EXIT_READY, NoDaemon, connection

HOPELESS = (AccessDeniedError, ClientClosedError, NoDaemonError)
"""After these the next message of a talk would fare no better."""
QUOTES = '"""'
HELP = f"""/clear   forget what was said, but for the system message
/bye     end; so does Ctrl-D
/help    this
{QUOTES}      begins a message of several lines, and ends it
Ctrl-C   cuts an answer short"""


def prompt_of(argument: str | None) -> str:
    """The argument, or what is piped in: where there is none, and for "-". Raises UsageError."""
    if argument not in (None, "-"):
        return str(argument)
    if argument is None and sys.stdin.isatty():
        raise click.UsageError("give a PROMPT, or pipe one in")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"what was piped in is no UTF-8 text: {error}") from None


def stream_answer(where: Path | Connection, fields: dict[str, Any], as_json: bool = False) -> int:
    """Print one answer as it comes, or several, then what it took; or all of it as JSON. Returns the exit code."""
    try:
        with _client(where) as client:
            if as_json:
                click.echo(_as_json(client.generate(**fields).result()))
            else:
                _print_stream(client, fields)
    except (NoDaemon, DeepInferError) as error:
        click.secho(f"error: {error}", err=True, fg="red")
        return error.code if isinstance(error, NoDaemon) else EXIT_FAILED
    return EXIT_READY


def _as_json(result: Completion) -> str:
    choices = [dataclasses.asdict(choice) for choice in result.choices]
    return json.dumps({"model": result.model, "usage": result.usage, "choices": choices}, ensure_ascii=False)


def chat_loop(where: Path | Connection, message: str | None, system: str | None, fields: dict[str, Any]) -> int:
    """A talk until the end of input; with `message`, one answer. Returns the exit code."""
    history = [{"role": "system", "content": system}] if system else []
    if message is not None:
        return stream_answer(where, {"messages": [*history, {"role": "user", "content": message}], **fields})
    try:
        with _client(where) as client:
            _talk(client, history, fields)
    except (NoDaemon, DeepInferError) as error:
        click.secho(f"error: {error}", err=True, fg="red")
        return error.code if isinstance(error, NoDaemon) else EXIT_FAILED
    return EXIT_READY


def _talk(client: Client, beginning: list[dict[str, str]], fields: dict[str, Any]) -> None:
    """An error costs its own message and no more: one that is too long, say, is said again in other words."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  Gives `input` editing and a history.

        click.echo("Ctrl-D ends the talk, /help lists what else there is.", err=True)
    history = list(beginning)
    while (line := next_message(_ask)) is not None:
        if line == "/bye":
            return
        if line == "/clear":
            history = list(beginning)
        elif line.startswith("/"):
            click.echo(
                HELP if line == "/help" else f"there is no {line.split()[0]}; /help lists what there is", err=True
            )
        elif line:
            asked = [*history, {"role": "user", "content": line}]
            try:
                answer = _print_stream(client, {"messages": asked, **fields})
            except HOPELESS:
                raise
            except DeepInferError as error:
                click.secho(f"error: {error}", err=True, fg="red")
                continue
            history = [*asked, {"role": "assistant", "content": answer}]


def next_message(ask: Callable[[str], str | None]) -> str | None:
    """What is said next, of several lines between quotes; None at the end of input. `ask` reads a line."""
    line = ask("> ")
    if line is None or not line.startswith(QUOTES):
        return line if line is None else line.strip()
    parts, rest = [], line.removeprefix(QUOTES)
    while not rest.rstrip().endswith(QUOTES):
        parts.append(rest)
        following = ask("... ")
        if following is None:
            return "\n".join(parts)
        rest = following
    return "\n".join([*parts, rest.rstrip().removesuffix(QUOTES)])


def _ask(prompt: str) -> str | None:
    """A line of input. Ctrl-C drops what was typed."""
    while True:
        try:
            return input(prompt if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            click.echo("\nCtrl-D or /bye ends the talk.", err=True)


def _client(where: Path | Connection) -> Client:
    if isinstance(where, Path):
        connection(where)
    return Client(where)


def _print_stream(client: Client, fields: dict[str, Any]) -> str:
    """The first answer as it comes, then the others. Returns the first one."""
    stream, count = client.generate(**fields), fields.get("n", 1)
    if count > 1:
        _head(1, count)
    try:
        for event in stream:
            if getattr(event, "choice", 0) == 0:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        stream.cancel()
    result = stream.result()
    sys.stdout.write("\n")
    for number, choice in enumerate(result.choices[1:], 2):
        _head(number, count)
        click.echo(choice.text)
    _print_cost(result)
    return result.text


def _head(number: int, count: int) -> None:
    click.secho(f"[{number} of {count}]", dim=True)


def _print_cost(result: Completion) -> None:
    usage, timings = result.usage, result.timings
    steps = len(result.ids) - 1
    speed = f"{steps / timings['decode_s']:.1f} tokens/s, " if steps > 0 and timings["decode_s"] > 0 else ""
    reasons = ", ".join(dict.fromkeys(choice.finish_reason for choice in result.choices))
    click.secho(
        f"{usage['prompt_tokens']} + {usage['completion_tokens']} tokens, {speed}first token after "
        f"{timings['ttft_s'] * 1000:.0f} ms, {reasons}",
        err=True,
        dim=True,
    )
