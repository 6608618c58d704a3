"""What `deepinfer-daemon bench slope` measures: which KV formats, at which context lengths, how often."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.daemon.bench.own_daemon import FORMATS, ROUNDS_HELP, OwnDaemon
from deepinfer.daemon.setting import ConfigError, numbers_of, setting
from deepinfer.stages.memory.sizes import blocks_for

BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class SlopeBench(OwnDaemon):
    kv_cache_dtype: str = setting(FORMATS, "KV formats, separated by commas; the others are compared with the first.")
    contexts: str = setting("256,512,1024,2048,4096", "Prompt lengths, separated by commas.")
    concurrency: int = setting(1, "Requests of that length at the same time.", low=1)
    max_new_tokens: int = setting(32, "Decode steps at each length and in each round.", low=4)
    rounds: int = setting(5, ROUNDS_HELP, low=1)

    def check(self) -> None:
        super().check()
        lengths = self.lengths
        if len(set(lengths)) < 2 or len(set(lengths)) < len(lengths) or min(lengths) < 1:
            raise ConfigError(
                f"contexts is {self.contexts!r}; it must be at least two different lengths, each at least 1", "contexts"
            )

    @property
    def lengths(self) -> list[int]:
        return numbers_of(self, "contexts", int)

    @property
    def new_tokens(self) -> int:
        """Of every stream: enough to be still there when the last one has been admitted."""
        return self.max_new_tokens + 2 * (self.concurrency - 1)

    def options(self, kv_format: str) -> list[str]:
        """Prompts of all lengths stay in the prefix cache, so that they are computed once."""
        each = [blocks_for(length + self.new_tokens, BLOCK_SIZE) + 1 for length in self.lengths]
        blocks = self.concurrency * sum(each)
        return [*super().options(kv_format), "--block-size", str(BLOCK_SIZE), "--num-blocks", str(blocks)]
