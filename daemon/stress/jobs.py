"""The load of a stress run: a catalogue of requests with known answers, and who asks for which of them when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from deepinfer.daemon.config import ConfigError
from deepinfer.daemon.stress.swap_config import SMOKE_NEW_TOKENS, StressConfig
from deepinfer.stages.memory.sizes import blocks_for

TOP_PRIORITY = 100
SHARED_RATE = 0.5


@dataclass(frozen=True)
class Question:
    """One request of the catalogue. It has log-probabilities, because they change when the argmax does not yet."""

    prompt: tuple[int, ...]
    options: dict[str, Any] = field(hash=False)

    @property
    def stored(self) -> int:
        """Tokens whose keys and values it stores until its end."""
        return len(self.prompt) + self.options["max_new_tokens"] - 1


class Cancel(NamedTuple):
    """The client cancels once it has seen this many events of this kind: 0 of "token" is at once."""

    kind: str
    after: int


class Start(NamedTuple):
    """A job starts when job `number` has sent its first "token", or its "end"."""

    number: int
    moment: str


class Job(NamedTuple):
    number: int
    question: int
    """Index into the catalogue."""
    priority: int = 0
    pause: float = 0.0
    """Seconds."""
    cancel: Cancel | None = None
    start: Start | None = None


def catalogue(config: StressConfig, vocab_size: int, max_context: int) -> list[Question]:
    """Half of them greedy, half sampled. Every one fits the pool alone. Raises ConfigError if none can be as long as is
    asked."""
    longest, most_blocks = blocks_for(max_context - 1, config.block_size), config.block_range[1]
    if most_blocks > max(longest, config.num_blocks):
        wish = config.request_blocks
        raise ConfigError(f"request_blocks is {wish!r}; this pool serves requests of up to {longest} blocks")
    random = np.random.default_rng([config.seed, 1])
    if config.scenario == "smoke":
        stored = config.num_blocks * config.block_size
        return [_question(random, vocab_size, stored, SMOKE_NEW_TOKENS, False) for _ in range(2)]
    questions = []
    for number in range(config.distinct):
        blocks = int(random.integers(*config.block_range, endpoint=True))
        most = min(blocks * config.block_size, max_context - 1)
        stored = int(random.integers(min(most, (blocks - 1) * config.block_size + 1), most, endpoint=True))
        new = int(random.integers(*config.new_token_range, endpoint=True))
        questions.append(_question(random, vocab_size, stored, min(new, stored), number % 2 == 1))
    return questions


def _question(random: np.random.Generator, vocab_size: int, stored: int, new: int, sampled: bool) -> Question:
    prompt = random.integers(1, vocab_size, stored + 1 - new).tolist()
    if random.random() < SHARED_RATE:
        shared = int(random.integers(len(prompt) + 1))
        prompt[:shared] = _common_beginning(vocab_size, shared)
    options: dict[str, Any] = {"max_new_tokens": new, "ignore_eos": True, "logprobs": 1, "temperature": 0.0}
    if sampled:
        options |= {"temperature": 0.8, "seed": int(random.integers(1 << 31))}
    return Question(tuple(prompt), options)


def _common_beginning(vocab_size: int, count: int) -> list[int]:
    """What prompts have in common, so that the prefix cache is part of the load."""
    return np.random.default_rng(0).integers(1, vocab_size, count).tolist()


def jobs(config: StressConfig) -> Iterator[Job]:
    """`config.request_limit` of them, the same for the same seed."""
    return _smoke_jobs(config) if config.scenario == "smoke" else _random_jobs(config)


def _random_jobs(config: StressConfig) -> Iterator[Job]:
    random = np.random.default_rng([config.seed, 2])
    for number in range(config.request_limit):
        yield Job(
            number,
            question=int(random.integers(config.distinct)),
            priority=int(random.integers(min(config.priorities, TOP_PRIORITY + 1))),
            pause=float(random.exponential(config.pause)),
            cancel=_random_cancel(random) if random.random() < config.cancel else None,
        )


def _random_cancel(random: np.random.Generator) -> Cancel:
    kind = ("token", "preempted", "resumed")[int(random.integers(3))]
    return Cancel(kind, int(random.integers(12)) if kind == "token" else 1)


def _smoke_jobs(config: StressConfig) -> Iterator[Job]:
    """A round is two requests; the second is sent when the first has its first token."""
    for number in range(0, config.request_limit - 1, 2):
        yield Job(number, 0, start=Start(number - 2, "end") if number else None)
        yield Job(number + 1, 1, start=Start(number, "token"))
