"""What `deepinfer-daemon bench jitter` measures: how many requests, of which size, and how many of them fit."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.daemon.bench.own_daemon import ROUNDS_HELP, OwnDaemon
from deepinfer.daemon.config import OFFLOAD_UNITS
from deepinfer.daemon.setting import ConfigError, setting
from deepinfer.stages.memory.sizes import blocks_for

BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class JitterBench(OwnDaemon):
    kv_cache_dtype: str = setting("auto", "KV format, as `start` has it.")
    offload_unit: str = setting("request", "What of a request is swapped, as `start` has it.", OFFLOAD_UNITS)
    requests: int = setting(8, "Requests of a pass.", low=2)
    fitting: int = setting(4, "How many of them the pool holds.", low=1)
    input_len: int = setting(64, "Prompt tokens of each.", low=1)
    max_new_tokens: int = setting(64, "Tokens that each generates.", low=2)
    rounds: int = setting(3, ROUNDS_HELP, low=1)

    def check(self) -> None:
        super().check()
        if len(self.formats) > 1:
            raise ConfigError(f"kv_cache_dtype is {self.kv_cache_dtype!r}; it must be one format", "kv_cache_dtype")
        if self.fitting >= self.requests:
            raise ConfigError(
                f"fitting is {self.fitting}; with {self.requests} requests it must be at most {self.requests - 1}, "
                "else nobody has to leave",
                "fitting",
            )

    def options(self, kv_format: str) -> list[str]:
        blocks = self.fitting * blocks_for(self.input_len + self.max_new_tokens, BLOCK_SIZE)
        return [
            *super().options(kv_format),
            *("--block-size", str(BLOCK_SIZE), "--num-blocks", str(blocks), "--no-prefix-cache"),
            *("--offload-unit", self.offload_unit),
        ]
