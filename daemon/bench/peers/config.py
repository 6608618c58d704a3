"""What `deepinfer-daemon bench peers` measures, and whom it measures beside us."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from deepinfer.daemon.bench.peers.roster import PEERS, Peer
from deepinfer.daemon.config import W4_ACTIVATIONS
from deepinfer.daemon.setting import ConfigError, check_values, numbers_of, setting

CHUNK = 256
"""Prompt tokens that servers compute between two decode steps, ours and OpenVINO's default."""
NAMES = tuple(peer.name for peer in PEERS)


class Arm(NamedTuple):
    """One thing that is measured of everybody: tokens/s of `streams` that decode behind prompts of `context` tokens, or
    of one prompt that is prefilled."""

    kind: str
    """`decode` or `prefill`."""
    streams: int
    context: int

    @property
    def name(self) -> str:
        if self.kind == "prefill":
            return f"prefill of {self.context}"
        return f"decode c={self.streams} at {self.context} tokens"


@dataclass(frozen=True, kw_only=True)
class PeersBench:
    """Everybody gets the same prompts, lengths and cores."""

    model: str = setting("smollm2-135m", "A GGUF file, an alias, or a folder if no peer needs a file.")
    threads: int | None = setting(None, "CPU threads and cores of everybody. Default: all cores it may use.", low=1)
    kv_cache_dtype: str = setting("auto", "Our KV format, as `start` has it.")
    batch_invariant: bool = setting(False, "Our mode of bit-equal results, as `start` has it.")
    w4_activations: str = setting("auto", "What our 4-bit weights meet, as `start` has it.", W4_ACTIVATIONS)
    concurrency: str = setting("1,4,8,16", "Numbers of streams that decode together.")
    contexts: str = setting("64,1024", "Prompt tokens of every stream that decodes.")
    prefill: str = setting("512", "Prompt tokens of the prompts whose prefill is measured.")
    new_tokens: int = setting(64, "Tokens that every stream decodes while all of them do.", low=8)
    rounds: int = setting(3, "How often everything is measured, in turns.", low=1)
    peers: str = setting(",".join(NAMES), "Whom to measure beside us.")
    answer_seconds: float = setting(600.0, "Seconds after which a peer that has not answered is given up.", low=1)

    def check(self) -> None:
        """Raises ConfigError for the first value that cannot work."""
        check_values(self)
        for name in ("concurrency", "contexts", "prefill"):
            if min(numbers_of(self, name, int)) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; each number must be at least 1", name)
        self.roster()
        cores = len(os.sched_getaffinity(0))
        if self.num_threads > cores:
            raise ConfigError(f"threads is {self.threads}; it must be at most {cores}, the cores it may use", "threads")

    @property
    def num_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))

    def arms(self) -> list[Arm]:
        streams, contexts = numbers_of(self, "concurrency", int), numbers_of(self, "contexts", int)
        decode = [Arm("decode", count, context) for context, count in product(contexts, streams)]
        return [*decode, *(Arm("prefill", 1, context) for context in numbers_of(self, "prefill", int))]

    def roster(self) -> list[Peer]:
        """Raises ConfigError for a name that nobody has."""
        names = [name.strip() for name in self.peers.split(",") if name.strip()]
        for name in names:
            if name not in NAMES:
                raise ConfigError(f"peers has {name!r}; it must be of: {', '.join(NAMES)}", "peers")
        return [peer for peer in PEERS if peer.name in names]

    def new_tokens_of(self, arm: Arm, starts_together: bool) -> int:
        """Where prompts are computed while earlier streams decode already, these need more tokens to be still there."""
        if arm.kind == "prefill":
            return 1
        return self.new_tokens + (0 if starts_together else arm.streams * (2 + arm.context // CHUNK))

    @property
    def most_streams(self) -> int:
        return max(arm.streams for arm in self.arms())

    @property
    def most_tokens(self) -> int:
        """Of one stream, prompt and answer."""
        return max(arm.context + self.new_tokens_of(arm, False) for arm in self.arms()) + 1


def pythons_of(wishes: Sequence[str]) -> dict[str, str]:
    """The Python of each peer that has one of its own, from texts NAME=PATH. Raises ConfigError."""
    found = {}
    for wish in wishes:
        name, equals, path = wish.partition("=")
        if not equals or name not in NAMES or not os.access(path, os.X_OK):
            raise ConfigError(
                f"peer_python is {wish!r}; it must be NAME=PATH, NAME of: {', '.join(NAMES)}, PATH a Python to execute",
                "peer_python",
            )
        found[name] = path
    return found
