"""What `deepinfer-daemon stress cycles` is told: how often a daemon is started, and what load it has when it is hit."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.daemon.setting import ConfigError, check_values, setting
from deepinfer.daemon.stress.cycle_plan import FRONT_BLOWS, KINDS, MOMENTS, STARTS, VICTIMS, Kind

TINY = "tiny"
"""What is given as a model's name for the one of `tiny_model`."""


@dataclass(frozen=True, kw_only=True)
class CyclesConfig:
    """A cycle: a start, a blow to the front or to the engine at some moment, an end, and a look at what is left."""

    model: str = setting(TINY, "tiny, a random model made for the run; or as `start` has it.")
    cycles: int = setting(200, "Starts.", low=1)
    seconds: float | None = setting(None, "Begin no other cycle after so many seconds.", low=0)
    first: int = setting(0, "Number of the first cycle: to repeat one of an earlier run with the same seed.", low=0)
    seed: int = setting(0, "Seed of blows and moments.", low=0)
    victims: str = setting(",".join(VICTIMS), "Who is hit, with commas.")
    blows: str = setting(",".join(FRONT_BLOWS), "How it is hit, with commas; freeze is for the front alone.")
    moments: str = setting(",".join(MOMENTS), "When it is hit, with commas.")
    starts: str = setting(",".join(STARTS), "How it is started, with commas.")
    streams: int = setting(6, "Streams of a cycle with load.", low=1)
    new_tokens: int = setting(400, "New tokens of each.", low=2)
    num_blocks: int = setting(32, "KV blocks of the pool; so few that the streams are swapped.", low=4)
    threads: int | None = setting(1, "CPU threads of the engine.", low=1)
    drain_s: int = setting(30, "Seconds that streams get after SIGTERM.", low=0)
    end_s: float = setting(60.0, "Seconds within which a daemon must have ended after its last signal.", low=1)

    def check(self) -> None:
        """Raises ConfigError."""
        check_values(self)
        if not self.kinds():
            raise ConfigError(f"blows is {self.blows!r}; none of them is for victims {self.victims!r}", "blows")

    def kinds(self) -> tuple[Kind, ...]:
        """What may be done, of all that can be. Raises ConfigError."""
        victims, blows = self._chosen("victims", VICTIMS), self._chosen("blows", FRONT_BLOWS)
        moments, starts = self._chosen("moments", MOMENTS), self._chosen("starts", STARTS)
        return tuple(
            (moment, (victim, blow), detach)
            for moment, (victim, blow), detach in KINDS
            if victim in victims and blow in blows and moment in moments and STARTS[detach] in starts
        )

    def _chosen(self, name: str, known: tuple[str, ...]) -> list[str]:
        chosen = getattr(self, name).split(",")
        if unknown := sorted(set(chosen) - set(known)):
            raise ConfigError(
                f"{name} is {getattr(self, name)!r}, with {unknown[0]!r}; it must be of: {', '.join(known)}"
            )
        return chosen

    def options(self, model: str) -> list[str]:
        """For `start`."""
        threads = [] if self.threads is None else ["--threads", str(self.threads)]
        blocks, drain = str(self.num_blocks), str(self.drain_s)
        return ["--model", model, "--num-blocks", blocks, "--drain-s", drain, *threads]
