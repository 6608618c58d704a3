"""What `deepinfer-daemon bench profile` measures."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.daemon.config import W4_ACTIVATIONS, EngineConfig
from deepinfer.daemon.setting import ConfigError, check_values, numbers_of, setting
from deepinfer.stages.memory.sizes import blocks_for

BLOCK_SIZE = 16
DAEMON_TOKENS = 64
"""Of every stream that decodes through a daemon."""


@dataclass(frozen=True, kw_only=True)
class ProfileBench:
    model: str = setting("smollm2-135m", "A folder, a GGUF file, an alias, or a hub id.")
    device: str = setting("auto", "Where the model runs, as `start` has it.")
    dtype: str = setting("auto", "Compute dtype, as `start` has it.")
    kv_cache_dtype: str = setting("auto", "KV format, as `start` has it.")
    threads: int | None = setting(None, "CPU threads of the engine. Default: all cores it may use.", low=1)
    batch_invariant: bool = setting(False, "The mode of bit-equal results, as `start` has it.")
    w4_activations: str = setting("auto", "What 4-bit weights meet, as `start` has it.", W4_ACTIVATIONS)
    concurrency: str = setting("1,4,8,16", "Rows of the decode steps.")
    context: int = setting(64, "Prompt tokens behind which every row decodes.", low=1)
    prefill: str = setting("256,512", "Rows of the prefill chunks.")
    rounds: int = setting(10, "How often everything is measured, in turns.", low=1)
    steps: int = setting(10, "Decode steps of each kind in a round.", low=1)
    daemon: bool = setting(True, "Also measure the same decode steps through a daemon's sockets.")

    def check(self) -> None:
        """Raises ConfigError for the first value that cannot work."""
        check_values(self)
        for name in ("concurrency", "prefill"):
            if min(numbers_of(self, name, int)) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; each number must be at least 1", name)

    @property
    def rows(self) -> list[int]:
        return numbers_of(self, "concurrency", int)

    @property
    def chunks(self) -> list[int]:
        return numbers_of(self, "prefill", int)

    @property
    def position(self) -> int:
        """Of the rows that decode: in the middle of what a daemon's streams go through."""
        return self.context + DAEMON_TOKENS // 2

    def engine(self) -> EngineConfig:
        """With a pool for whatever is largest."""
        decode, chunk = blocks_for(self.position + 2, BLOCK_SIZE), blocks_for(max(self.chunks) + 1, BLOCK_SIZE)
        return EngineConfig(
            **self._wishes(),
            block_size=BLOCK_SIZE,
            num_blocks=max(decode * max(self.rows), chunk),
            max_running=max(self.rows),
            prefill_chunk_tokens=max(self.chunks),
            prefix_cache=False,
            cpu_offload=False,
        )

    def daemon_options(self) -> list[str]:
        """Of `deepinfer-daemon start`."""
        longest = self.context + DAEMON_TOKENS + 2 * max(self.rows) + self.context * max(self.rows) // BLOCK_SIZE
        pool = max(self.rows) * (longest + BLOCK_SIZE)
        wishes = {name.replace("_", "-"): value for name, value in self._wishes().items() if name != "batch_invariant"}
        return [
            *(part for name, value in wishes.items() if value is not None for part in (f"--{name}", str(value))),
            *("--no-prefix-cache", "--max-cache", str(pool), "--max-running", str(max(self.rows))),
            *(["--batch-invariant"] if self.batch_invariant else []),
        ]

    def _wishes(self) -> dict:
        names = ("model", "device", "dtype", "kv_cache_dtype", "threads", "batch_invariant", "w4_activations")
        return {name: getattr(self, name) for name in names}
