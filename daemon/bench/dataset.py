"""Prompts from a file: JSON lines with a `prompt` or `messages` each, or the JSON list of ShareGPT conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from deepinfer.daemon.setting import ConfigError

PEOPLE = ("human", "user")
ANSWERING = ("gpt", "assistant", "chatgpt", "bing", "bard")
LENGTH_FIELDS = ("max_new_tokens", "output_tokens", "max_tokens")


class Entry(NamedTuple):
    """Exactly one of `prompt` and `messages`."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, str]] | None = None
    new_tokens: int | None = None
    answer: str | None = None
    """What was answered in the file: as many tokens are asked for."""


class Dataset(NamedTuple):
    entries: list[Entry]
    skipped: int
    """ShareGPT conversations that do not begin with a question and its answer."""


def read_dataset(path: Path) -> Dataset:
    """Raises ConfigError, which names file, line or place, and what is wrong there."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"dataset: cannot read {path}: {error.strerror}", "dataset") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"dataset: {path} is not UTF-8: {error}", "dataset") from error
    found = _sharegpt(path, text) if text.lstrip().startswith("[") else Dataset(list(_lines(path, text)), 0)
    if not found.entries:
        raise ConfigError(f"dataset: {path} holds no prompt that can be sent", "dataset")
    return found


def _lines(path: Path, text: str) -> Iterator[Entry]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield _entry(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"dataset: {path}, line {number}: {error}", "dataset") from error


def _entry(value: Any) -> Entry:
    """Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"a line is a map with `prompt` or `messages`, not {_kind(value)}")
    if ("prompt" in value) == ("messages" in value):
        raise ValueError("a line has either `prompt` or `messages`")
    lengths = [value[name] for name in LENGTH_FIELDS if name in value]
    for length in lengths:
        if type(length) is not int or length < 1:
            raise ValueError(f"the number of tokens to generate is {length!r}; it must be an integer of at least 1")
    new_tokens = lengths[0] if lengths else None
    if "prompt" in value:
        return Entry(prompt=_prompt(value["prompt"]), new_tokens=new_tokens)
    return Entry(messages=_messages(value["messages"]), new_tokens=new_tokens)


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(id) is int and id >= 0 for id in value):
        return value
    raise ValueError(f"`prompt` is {_kind(value)}; it must be a text, or a list of token ids, that is not empty")


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"`messages` is {_kind(value)}; it must be a list of maps with `role` and `content`")
    for index, message in enumerate(value):
        texts = isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
        if not texts or set(message) != {"role", "content"}:
            raise ValueError(f"`messages[{index}]` must be a map of the texts `role` and `content`")
    return value


def _sharegpt(path: Path, text: str) -> Dataset:
    try:
        conversations = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"dataset: {path} is not JSON: {error}", "dataset") from error
    entries, skipped = [], 0
    for index, conversation in enumerate(conversations):
        entry = _first_turns(path, index, conversation)
        if entry is None:
            skipped += 1
        else:
            entries.append(entry)
    return Dataset(entries, skipped)


def _first_turns(path: Path, index: int, conversation: Any) -> Entry | None:
    """The first question, and the answer that it got."""
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list):
        raise ConfigError(f"dataset: {path}, item {index}: a conversation has a list `conversations`", "dataset")
    for place, turn in enumerate(turns[:2]):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in ("from", "value")):
            raise ConfigError(
                f"dataset: {path}, item {index}: `conversations[{place}]` must have the texts `from` and `value`",
                "dataset",
            )
    if len(turns) < 2 or turns[0]["from"] not in PEOPLE or turns[1]["from"] not in ANSWERING:
        return None
    question, answer = turns[0]["value"], turns[1]["value"]
    return Entry(prompt=question, answer=answer) if question and answer else None


def _kind(value: Any) -> str:
    if value == "" or value == [] or value == {}:
        return "empty"
    return {str: "a text", list: "a list", dict: "a map", type(None): "null", bool: "true or false"}.get(
        type(value), "a number"
    )
