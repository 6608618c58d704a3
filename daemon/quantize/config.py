"""What `deepinfer-daemon quantize` is asked for: scheme, groups, head, what is searched, and what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepinfer.daemon.config import EngineConfig
from deepinfer.daemon.setting import ConfigError, check_values, setting, settings_of

SCHEMES = ("w4a16",)
GROUP_SIZES = (128, 64, 32)
"""Columns that share a scale, of matrices whose columns they divide."""
HEADS = ("keep", "int8", "w4")
CALIBRATION = Path(__file__).with_name("calibration.txt")
WHEN = ("auto", "on", "off")

_DEVICES = settings_of(EngineConfig)["device"].metadata["choices"]


@dataclass(frozen=True, kw_only=True)
class Quantize:
    scheme: str = setting("w4a16", "Of the weights; activations stay in 16 bits.", SCHEMES)
    group_size: int | None = setting(
        None,
        "Columns that share a scale: 128, 64 or 32; in matrices whose columns it does not divide, the next smaller "
        "one. [default: the largest that divides the columns of all matrices]",
    )
    symmetric: bool = setting(False, "Scales only, no zero points.")
    head: str = setting(
        "keep",
        "The output head: as it is, in 8 or in 4 bits. One that is tied to the embedding is stored beside it.",
        HEADS,
    )
    clip: str = setting("auto", "Search for each group the part of its range that errs least. auto: with --awq.", WHEN)
    awq: bool = setting(
        False, "Scale channels by how active they are on a text, as far as it helps (AWQ). Loads the whole source."
    )
    calibration: str | None = setting(
        None, "A UTF-8 file, the text of --awq. [default: one that comes with the program]"
    )
    calibration_tokens: int = setting(2048, "Tokens of it that are read.", low=16)
    shard_mib: int = setting(4096, "MiB of one file of weights, unless a single matrix is larger.", low=1)
    kld: str = setting(
        "auto", "Compare what the result says with what the source says. auto: where memory has room for both.", WHEN
    )
    text: str | None = setting(None, "A UTF-8 file for --kld. [default: one that comes with the program]")
    positions: int = setting(1534, "Teacher-forced positions that are compared.", low=1)
    window: int = setting(1024, "Tokens of each piece of the text, which begins with an empty context.", low=2)
    skip: int = setting(256, "Positions at the beginning of each piece that are not compared.", low=0)
    device: str = setting("auto", "Where the models run that are compared, as `start` has it.", _DEVICES)
    threads: int | None = setting(None, "CPU threads. [default: all cores it may use]", low=1)
    force: bool = setting(False, "Replace the folder that is there, if it holds a model.")

    @property
    def clips(self) -> bool:
        return self.awq if self.clip == "auto" else self.clip == "on"

    def check(self) -> None:
        """Raises ConfigError for the first value that cannot work."""
        check_values(self)
        if self.group_size not in (None, *GROUP_SIZES):
            sizes = ", ".join(str(size) for size in GROUP_SIZES)
            raise ConfigError(f"group_size is {self.group_size}; it must be one of: {sizes}", "group_size")
        if self.calibration is not None and not self.awq:
            raise ConfigError(f"calibration is {self.calibration!r}, which only --awq reads", "calibration")
        if self.skip > self.window - 2:
            raise ConfigError(
                f"skip is {self.skip}; with window {self.window} it must be at most {self.window - 2}", "skip"
            )
