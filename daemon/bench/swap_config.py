"""What `deepinfer-daemon bench swap` measures: the model, the daemon's settings, and how large and how often."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.daemon.config import OFFLOAD_UNITS
from deepinfer.daemon.setting import ConfigError, check_values, setting

BLOCK_SIZE = 16
STAYING = 2
SPARE_BLOCKS = 2
"""So that the watermark does not keep a swapped request out until those that stay have ended."""
OVERSUBSCRIBED = 8
FITTING = 2


@dataclass(frozen=True, kw_only=True)
class SwapBench:
    """All experiments share one daemon, so the sizes of their requests follow from its pool."""

    model: str = setting("smollm2-135m", "A folder, a GGUF file, an alias, or a hub id.")
    device: str = setting("auto", "Where the model runs, as `start` has it.")
    threads: int | None = setting(None, "CPU threads of the engine. Default: all cores it may use.", low=1)
    kv_cache_dtype: str = setting("auto", "KV format, as `start` has it.")
    offload_unit: str = setting("request", "What of a request is swapped, as `start` has it.", OFFLOAD_UNITS)
    num_blocks: int = setting(32, "KV blocks of the pool, of 16 tokens. A multiple of 4.", low=16)
    pair_tokens: int = setting(16, "Tokens that each of two requests generates which do not fit side by side.", low=8)
    rounds: int = setting(3, "How often each experiment is run, in turns.", low=1)
    iterations: int = setting(5, "Forced swaps of a round.", low=1)

    def check(self) -> None:
        """Raises ConfigError for the first value that cannot work."""
        check_values(self)
        if self.num_blocks % 4:
            raise ConfigError(f"num_blocks is {self.num_blocks}; it must be a multiple of 4", "num_blocks")
        most = self.beside_blocks * BLOCK_SIZE
        if self.pair_tokens > most:
            raise ConfigError(
                f"pair_tokens is {self.pair_tokens}; with num_blocks {self.num_blocks} it must be at most {most}",
                "pair_tokens",
            )

    @property
    def staying_blocks(self) -> int:
        """Of each of the requests that stay while others swap. Half of them is for the prompt."""
        return self.num_blocks // 4

    @property
    def beside_blocks(self) -> int:
        """Of each of the two that swap beside them: more than those that stay have not grown into yet."""
        return self.num_blocks - STAYING * self.staying_blocks - SPARE_BLOCKS

    @property
    def fitting_blocks(self) -> int:
        """Of each of the requests that are too many. Half of them is for the prompt."""
        return self.num_blocks // FITTING

    def options(self) -> list[str]:
        """Of `deepinfer-daemon start`."""
        return [
            *("--model", self.model, "--device", self.device, "--kv-cache-dtype", self.kv_cache_dtype),
            *("--offload-unit", self.offload_unit, "--no-prefix-cache", "--block-size", str(BLOCK_SIZE)),
            *("--num-blocks", str(self.num_blocks)),
            *(() if self.threads is None else ("--threads", str(self.threads))),
        ]
