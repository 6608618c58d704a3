"""What `deepinfer-daemon stress swap` is told: the pool, the load, the faults, and the limits it checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.daemon.config import OFFLOAD_UNITS, ConfigError, EngineConfig, setting
from deepinfer.daemon.setting import check_values, from_text, settings_of
from deepinfer.stages.preemption import MODES

SCENARIOS = ("random", "smoke")
SMOKE_NEW_TOKENS = 8
UNLIMITED = 1 << 40


@dataclass(frozen=True, kw_only=True)
class StressConfig:
    """Rates are probabilities from 0 to 1. The seed decides what is asked and which copies fail, not when."""

    model: str = setting("smollm2-135m", "A folder, a GGUF file, an alias, or a hub id.")
    scenario: str = setting(
        "random",
        "random: arrivals, cancels and priorities by the seed. smoke: in turns, two requests that each need the pool.",
        SCENARIOS,
    )
    seed: int = setting(0, "Seed of prompts, arrivals, cancels, priorities and faults.")
    num_blocks: int = setting(12, "KV blocks of the pool.")
    block_size: int = setting(16, "Tokens of one KV block.")
    clients: int = setting(6, "Connections, each with one open request.")
    requests: int | None = setting(
        None, "Requests of one KV format. [default: 60, 10 in the smoke, without end under --duration]"
    )
    duration: float | None = setting(None, "Seconds after which nothing new is asked.")
    distinct: int = setting(12, "Different requests; each is first run alone, which gives what it must say.")
    request_blocks: str | None = setting(
        None,
        "LEAST:MOST blocks of a request, where windows slide perhaps more than there are. [default: a quarter to all]",
    )
    new_tokens: str = setting("4:32", "LEAST:MOST new tokens of a request; its prompt is the rest of its blocks.")
    pause: float = setting(0.005, "Mean seconds between the requests of one client.")
    preemption: str = setting("swap", "How requests make room, as `start` has it.", MODES)
    offload_unit: str = setting("request", "What of a request is swapped, as `start` has it.", OFFLOAD_UNITS)
    max_cpu_offload_mb: int = setting(256, "Host memory for swapped requests, in MiB.")
    host_blocks: int | None = setting(None, "Leave only this many blocks of the host memory; 0 is legal.")
    cancel: float = setting(0.0, "Rate of requests that their client cancels, at a random moment.")
    priorities: int = setting(1, "Priorities in use, from 0 on; 1 is all equal.")
    slow_copies: str | None = setting(None, "RATE:SECONDS of copies that take longer.")
    failed_copies: float = setting(0.0, "Rate of copies that fail.")
    corrupt_copies: float = setting(0.0, "Rate of copies with one wrong byte: the checks must then fail.")
    allow_exhausted: bool = setting(
        False, "Let an answer end with kv_exhausted, as it may when requests are neither swapped nor computed again."
    )
    fitting: bool = setting(False, "Also run the same requests only as many at a time as fit, and compare tokens/s.")
    rss_limit_mb: int = setting(32, "Growth of the process that is still called flat, in MiB.")
    stall_s: float = setting(60.0, "Seconds without any event after which the run has hung.")

    def check(self) -> None:
        """Raises ConfigError for the first value that cannot work."""
        check_values(self)
        for name in ("num_blocks", "clients", "requests", "distinct", "priorities"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        for name in ("cancel", "failed_copies", "corrupt_copies"):
            _check_rate(name, getattr(self, name))
        if self.host_blocks is not None and self.host_blocks < 0:
            raise ConfigError(f"host_blocks is {self.host_blocks}; it must be 0 or more")
        if self.scenario == "smoke" and self.num_blocks * self.block_size <= SMOKE_NEW_TOKENS:
            raise ConfigError(
                f"num_blocks is {self.num_blocks}; the smoke needs room for {SMOKE_NEW_TOKENS} new tokens"
            )
        least, most = self.block_range
        if not 1 <= least <= most:
            raise ConfigError(f"request_blocks is {least}:{most}; it must be LEAST:MOST with 1 <= LEAST <= MOST")
        least, most = self.new_token_range
        if not 1 <= least <= most:
            raise ConfigError(f"new_tokens is {least}:{most}; it must be LEAST:MOST with 1 <= LEAST <= MOST")
        _check_rate("slow_copies", self.slow[0])

    @property
    def request_limit(self) -> int:
        if self.requests is not None:
            return self.requests
        if self.duration is not None:
            return UNLIMITED
        return 10 if self.scenario == "smoke" else 60

    @property
    def block_range(self) -> tuple[int, int]:
        if self.request_blocks is None:
            return max(1, self.num_blocks // 4), self.num_blocks
        return _pair("request_blocks", self.request_blocks, int)

    @property
    def new_token_range(self) -> tuple[int, int]:
        return _pair("new_tokens", self.new_tokens, int)

    @property
    def slow(self) -> tuple[float, float]:
        """Rate and seconds."""
        if self.slow_copies is None:
            return 0.0, 0.0
        if ":" not in self.slow_copies:
            raise ConfigError(f"slow_copies is {self.slow_copies!r}; it must be RATE:SECONDS, as in 0.1:0.05")
        return _pair("slow_copies", self.slow_copies, float)


def _check_rate(name: str, rate: float) -> None:
    if not 0 <= rate <= 1:
        raise ConfigError(f"{name} is {rate}; a rate lies between 0 and 1")


def _pair(name: str, text: str, number: type) -> tuple[Any, Any]:
    """Two numbers; a single one counts twice."""
    first, colon, second = text.partition(":")
    try:
        return number(first), number(second if colon else first)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; it must be two numbers, as in 1:2") from None


def engine_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, where NAME is a field of EngineConfig, to keyword arguments. Raises ConfigError."""
    known = settings_of(EngineConfig)
    settings = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in known:
            raise ConfigError(f"set is {assignment!r}; it must be NAME=VALUE with a NAME of: {', '.join(known)}")
        settings[name] = from_text(EngineConfig, name, text)
    return settings
