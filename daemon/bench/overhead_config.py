"""What `deepinfer-daemon bench overhead` measures: which decode step, and how many of them."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.daemon.bench.own_daemon import ROUNDS_HELP, OwnDaemon
from deepinfer.daemon.config import EngineConfig
from deepinfer.daemon.setting import ConfigError, setting
from deepinfer.stages.memory.sizes import blocks_for

BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class OverheadBench(OwnDaemon):
    kv_cache_dtype: str = setting("auto", "KV format, as `start` has it.")
    concurrency: int = setting(8, "Rows of a decode step.", low=1)
    input_len: int = setting(64, "Prompt tokens of each.", low=1)
    max_new_tokens: int = setting(64, "Decode steps of a pass.", low=4)
    rounds: int = setting(9, ROUNDS_HELP, low=1)

    def check(self) -> None:
        super().check()
        if len(self.formats) > 1:
            raise ConfigError(f"kv_cache_dtype is {self.kv_cache_dtype!r}; it must be one format", "kv_cache_dtype")

    @property
    def new_tokens(self) -> int:
        """Of every stream: enough to be still there when the last one has been admitted."""
        return self.max_new_tokens + 2 * self.concurrency

    @property
    def blocks_each(self) -> int:
        return blocks_for(self.input_len + self.new_tokens, BLOCK_SIZE)

    @property
    def engine(self) -> EngineConfig:
        """Of the daemon, and of the engine that is measured without one."""
        return EngineConfig(
            model=self.model,
            device=self.device,
            threads=self.threads,
            kv_cache_dtype=self.formats[0],
            block_size=BLOCK_SIZE,
            num_blocks=self.concurrency * self.blocks_each,
            prefix_cache=False,
            cpu_offload=False,
        )

    def options(self, kv_format: str) -> list[str]:
        return [
            *super().options(kv_format),
            *("--block-size", str(BLOCK_SIZE), "--num-blocks", str(self.engine.num_blocks), "--no-prefix-cache"),
            "--no-cpu-offload",
        ]
