"""What `deepinfer-daemon stress streams` is told: how many streams there are, and what may not become of them."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.daemon.setting import ConfigError, check_values, setting
from deepinfer.daemon.stress.cycles_config import TINY
from deepinfer.stages.protocol_limits import Limits

LIMITS = Limits()


@dataclass(frozen=True, kw_only=True)
class StreamsConfig:
    """First all streams over some connections, then more over one, then others beside a client that never reads."""

    model: str = setting(TINY, "tiny, a random model made for the run; or as `start` has it.")
    streams: int = setting(1000, "Streams at the same time.", low=1, high=LIMITS.max_queue)
    connections: int = setting(50, "Connections that they come over.", low=1)
    queued: int = setting(2000, "Streams over one connection; 0 leaves this out.", low=0, high=LIMITS.max_streams)
    new_tokens: int = setting(24, "New tokens of each of them.", low=1)
    rounds: int = setting(9, "Rounds beside one that never reads; 0 leaves this out.", low=0)
    others: int = setting(8, "Streams whose pauses are measured in a round.", low=1)
    burden: int = setting(24, "Streams of the client that never reads.", low=1)
    round_tokens: int = setting(300, "New tokens of a stream in a round.", low=20)
    num_blocks: int = setting(1024, "KV blocks of the pool.", low=4)
    max_running: int = setting(64, "Requests that hold KV blocks at the same time; the others are queued.", low=1)
    threads: int | None = setting(1, "CPU threads of the engine.", low=1)
    control_ms: float = setting(200.0, "Milliseconds within which the control socket must answer.")
    gap_ratio: float = setting(1.2, "How much longer the pauses of others (99 of 100) may be than in the baseline.")
    growth_mb: float = setting(10.0, "What one that never reads may cost the front process, in MiB.")
    stall_s: float = setting(120.0, "Seconds without any event after which the run has hung.", low=1)

    def check(self) -> None:
        """Raises ConfigError."""
        check_values(self)
        if self.connections > self.streams:
            raise ConfigError(f"connections is {self.connections}; it must be at most streams, {self.streams}")

    def options(self, model: str) -> list[str]:
        """For `start`."""
        threads = [] if self.threads is None else ["--threads", str(self.threads)]
        sizes = ["--num-blocks", str(self.num_blocks), "--max-running", str(self.max_running)]
        return ["--model", model, *sizes, "--metrics-interval-ms", "50", *threads]
