"""What `deepinfer-daemon bench concurrency` measures: which daemon, which load, at how many requests at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from deepinfer.daemon.bench.own_daemon import ROUNDS_HELP, OwnDaemon
from deepinfer.daemon.setting import ConfigError, numbers_of, setting

ROUND_PER_CONCURRENCY = 4
"""Requests of a pass for each that runs at the same time, where --num-prompts does not say how many."""


@dataclass(frozen=True, kw_only=True)
class ConcurrencyBench(OwnDaemon):
    rounds: int = setting(3, ROUNDS_HELP, low=1)
    concurrency: str = setting("1,2,4", "Requests at the same time, at most; several numbers are a sweep.")
    max_cache: int | None = setting(None, "Tokens of the KV pool, as `start` has it.", low=1)
    prefill_chunk_tokens: int | None = setting(None, "Prompt tokens of a prefill chunk, as `start` has it.", low=1)
    prefix_cache: bool = setting(True, "Share prompt beginnings, within a pass.")
    in_turn: bool = setting(
        False, "Start the daemon of each KV format anew in every round, where memory does not hold all of them at once."
    )
    connect: str | None = setting(
        None, "Measure a daemon that runs already: an endpoint, a connection file or a runtime folder."
    )
    num_prompts: int | None = setting(
        None, f"Requests of a pass. [default: {ROUND_PER_CONCURRENCY} for each that runs at the same time]", low=1
    )
    request_rate: float = setting(math.inf, "Requests a second, as a Poisson process. inf: all at once.")
    input_len: int = setting(64, "Prompt tokens of random prompts.", low=1, aliases=("--random-input-len",))
    range_ratio: float = setting(
        0.0, "Random prompts have lengths between 1 - r and 1 + r times --input-len, evenly.", low=0, high=1
    )
    lognormal_sigma: float = setting(
        0.0, "Random prompts have log-normal lengths around the median --input-len; 0.5 to 1 is usual.", low=0, high=4
    )
    max_new_tokens: int | None = setting(
        None,
        "Tokens to generate. [default: what the data set says, else 64]",
        low=1,
        aliases=("--output-len", "--random-output-len"),
    )
    dataset: str | None = setting(
        None, "A file of prompts: JSON lines with `prompt` or `messages`, or the JSON of ShareGPT."
    )
    ignore_eos: bool = setting(True, "Generate as many tokens as are asked for, past end tokens.")
    seed: int = setting(0, "Of prompts, lengths, their order, and arrivals.", low=0)
    save_detailed: bool = setting(False, "Write texts, lengths and latencies of every request into the JSON.")

    def check(self) -> None:
        super().check()
        if not self.levels or min(self.levels) < 1 or len(set(self.levels)) < len(self.levels):
            raise ConfigError(
                f"concurrency is {self.concurrency!r}; it must be different integers of at least 1", "concurrency"
            )
        if not self.request_rate > 0:
            raise ConfigError(f"request_rate is {self.request_rate}; it must be above 0, or inf", "request_rate")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range_ratio is {self.range_ratio}; it must be below 1", "range_ratio")
        if self.range_ratio and self.lognormal_sigma:
            raise ConfigError(
                f"range_ratio is {self.range_ratio} and lognormal_sigma {self.lognormal_sigma}; give only one"
            )
        if self.dataset is not None:
            self._refuse("dataset", "has prompts of its own", ("input_len", "range_ratio", "lognormal_sigma"))
        if self.connect is not None:
            names = ("model", "device", "threads", "kv_cache_dtype", "max_cache", "prefill_chunk_tokens")
            self._refuse("connect", "names a daemon with settings of its own", (*names, "prefix_cache", "in_turn"))

    def _refuse(self, given: str, why: str, others: tuple[str, ...]) -> None:
        usual = {field.name: field.default for field in fields(self)}
        for name in others:
            if getattr(self, name) != usual[name]:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, but {given} {why}: leave {name} out", name)

    @property
    def levels(self) -> list[int]:
        return numbers_of(self, "concurrency", int)

    def prompts(self, level: int) -> int:
        return self.num_prompts or ROUND_PER_CONCURRENCY * level

    def options(self, kv_format: str) -> list[str]:
        more = {"max-cache": self.max_cache, "prefill-chunk-tokens": self.prefill_chunk_tokens}
        return [
            *super().options(kv_format),
            *(part for name, value in more.items() if value is not None for part in (f"--{name}", str(value))),
            *(() if self.prefix_cache else ("--no-prefix-cache",)),
        ]
