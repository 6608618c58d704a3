"""What `kv-quality` has a model read: windows of a text, the beginnings of greedy continuations, passkey prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from deepinfer.daemon.quality.config import OWN_TEXT, PROMPT_TOKENS, KvQuality
from deepinfer.daemon.setting import ConfigError
from deepinfer.stages.model import Tokenizer

PASSKEY = " 48213"
_TASK = "There is a pass key hidden in this text. Find it and remember it.\n"
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_NEEDLE = f"The pass key is{PASSKEY}. Remember it:{PASSKEY} is the pass key.\n"
_QUESTION = "What is the pass key? The pass key is"


class Passkey(NamedTuple):
    tokens: int
    """What the prompt was to be long; it is at most that."""
    depth: float
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Material:
    source: str
    tokens: int
    """Of the whole text."""
    windows: list[list[int]]
    """Pieces of the text; those after `skip` tokens, but for the last, are compared."""
    prompts: list[list[int]]
    passkeys: list[Passkey]

    @property
    def longest(self) -> int:
        return max(
            max(len(window) for window in self.windows),
            max(len(passkey.prompt) + len(passkey.answer) for passkey in self.passkeys),
        )


def read_material(settings: KvQuality, tokenizer: Tokenizer) -> Material:
    """Raises ConfigError for a text that cannot be read or is too short."""
    text = read_text(settings.text, "text")
    begin = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special=False)
    return Material(
        source=name_of(settings.text),
        tokens=len(ids),
        windows=cut_windows(ids, begin, settings.positions, settings.window, settings.skip),
        prompts=_prompts(ids, begin, settings.prompts),
        passkeys=[
            _passkey(tokenizer, begin, length, depth) for length in settings.lengths for depth in settings.depths
        ],
    )


def read_text(file: str | None, setting: str) -> str:
    """Of the file that `setting` names, or the own text. Raises ConfigError."""
    path = OWN_TEXT if file is None else Path(file)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} is {str(path)!r}, which cannot be read as UTF-8: {error}", setting) from error


def name_of(file: str | None) -> str:
    """As reports have it, without the place."""
    return "own" if file is None else Path(file).name


def cut_windows(ids: list[int], begin: list[int], positions: int, window: int, skip: int) -> list[list[int]]:
    """Each begins as a text of its own does. The last one ends where enough positions are compared: those after `skip`
    tokens, but for the last of each. Raises ConfigError for a text that is too short."""
    windows, missing, at = [], positions, 0
    while missing > 0:
        own = min(window, skip + missing + 1) - len(begin)
        piece = begin + ids[at : at + own]
        compared = len(piece) - skip - 1
        if compared < 1 or (at + own > len(ids) and compared < missing):
            raise ConfigError(
                f"positions is {positions}; this text has {len(ids)} tokens, which are {missing} positions "
                f"too few with window {window} and skip {skip}",
                "positions",
            )
        windows.append(piece)
        missing -= compared
        at += own
    return windows


def _prompts(ids: list[int], begin: list[int], count: int) -> list[list[int]]:
    """Evenly spread over the text."""
    if len(ids) < count + PROMPT_TOKENS:
        raise ConfigError(f"prompts is {count}; this text of {len(ids)} tokens has room for fewer", "prompts")
    stride = (len(ids) - PROMPT_TOKENS) // count
    return [begin + ids[at : at + PROMPT_TOKENS] for at in range(0, stride * count, stride)]


def _passkey(tokenizer: Tokenizer, begin: list[int], length: int, depth: float) -> Passkey:
    task, filler, needle, question, answer = (
        tokenizer.encode(part, add_special=False) for part in (_TASK, _FILLER, _NEEDLE, _QUESTION, PASSKEY)
    )
    lines = (length - len(begin + task + needle + question)) // len(filler)
    if lines < 0:
        raise ConfigError(f"passkey_tokens is {length}; the task alone takes more", "passkey_tokens")
    before = round(depth * lines)
    prompt = begin + task + filler * before + needle + filler * (lines - before) + question
    return Passkey(length, depth, prompt, answer)
