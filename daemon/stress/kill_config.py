"""What `deepinfer-daemon stress kill` is told: the load, and how engines die."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from deepinfer.daemon.setting import ConfigError, check_values, setting
from deepinfer.daemon.stress.swap_config import StressConfig

SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}


@dataclass(frozen=True, kw_only=True)
class KillConfig:
    """A round: all streams at once, and one death of the engine, at a random moment of them or after them."""

    model: str = setting("smollm2-135m", "As `start` has it; or tiny, a random model made for the run.")
    rounds: int = setting(20, "Engines to kill.", low=1)
    seconds: float | None = setting(None, "Begin no other round after so many seconds.", low=0)
    streams: int = setting(16, "Streams at the same time.", low=1)
    seed: int = setting(0, "Seed of prompts and moments.", low=0)
    signals: str = setting("kill,segv", "How engines die, at random: kill, segv, stop, with commas. stop is a hang.")
    twice: float = setting(0.2, "Rate of rounds in which the next engine dies too.", low=0, high=1)
    threads: int | None = setting(None, "CPU threads of the engine. Default: all cores it may use.", low=1)
    num_blocks: int = setting(96, "KV blocks of the pool.", low=4)
    max_running: int = setting(12, "Requests that hold KV blocks at the same time; the others are queued.", low=1)
    prefill_chunk_tokens: int = setting(32, "Prompt tokens computed between two decode steps.", low=1)
    new_tokens: str = setting("20:120", "LEAST:MOST new tokens of a request.")
    hang_timeout_s: int = setting(5, "After which a stopped engine is killed by the daemon.", low=2)
    stall_s: float = setting(120.0, "Seconds without any event after which the run has hung.")

    def load(self) -> StressConfig:
        """Requests from a tenth to a third of the pool. Raises ConfigError."""
        check_values(self)
        unknown = sorted(set(self.signals.split(",")) - SIGNALS.keys())
        if unknown:
            raise ConfigError(f"signals is {self.signals!r}; it must be of: {', '.join(SIGNALS)}")
        load = StressConfig(
            model=self.model,
            seed=self.seed,
            num_blocks=self.num_blocks,
            clients=self.streams,
            distinct=2 * self.streams,
            request_blocks=f"{max(1, self.num_blocks // 10)}:{max(1, self.num_blocks // 3)}",
            new_tokens=self.new_tokens,
            pause=0.01,
        )
        load.check()
        return load

    def options(self) -> list[str]:
        names = ("model", "num_blocks", "max_running", "prefill_chunk_tokens", "hang_timeout_s")
        pairs = [(f"--{name.replace('_', '-')}", str(getattr(self, name))) for name in names]
        threads = [] if self.threads is None else ["--threads", str(self.threads)]
        return [word for pair in pairs for word in pair] + threads + ["--batch-invariant"]
