"""What `deepinfer-daemon kv-quality` measures: model, KV formats, text, positions, prompts, and the gate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepinfer.daemon.config import W4_ACTIVATIONS, EngineConfig
from deepinfer.daemon.setting import ConfigError, check_values, numbers_of, setting, settings_of
from deepinfer.kernels import CODECS, resolve_kv_format

OWN_TEXT = Path(__file__).with_name("text.txt")
USUAL = (
    *("fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2"),
    *("fp16/int8", "int8/fp16", "fp16/fp8_e4m3", "fp8_e4m3/fp16"),
    *("int8/fp8_e4m3", "int8/fp8_e5m2", "fp8_e4m3/int8", "fp8_e4m3/fp8_e5m2"),
)
PROMPT_TOKENS = 32

_CHOICES = {name: field.metadata["choices"] for name, field in settings_of(EngineConfig).items()}


@dataclass(frozen=True, kw_only=True)
class KvQuality:
    """The gate holds for every format that is measured."""

    model: str = setting("smollm2-135m", "A folder, a GGUF file, an alias, or a hub id.")
    text: str | None = setting(None, "A UTF-8 file. [default: one that comes with the program]")
    formats: str = setting(
        "usual", "KV formats, separated by commas; usual: every format and the mixes that make sense; all: every pair."
    )
    device: str = setting("auto", "Where the model runs, as `start` has it.", _CHOICES["device"])
    threads: int | None = setting(None, "CPU threads. [default: all cores it may use]", low=1)
    dtype: str = setting(
        "fp32", "Compute dtype, and the KV format that the others are compared with.", _CHOICES["dtype"]
    )
    w4_activations: str = setting(
        "auto",
        "What 4-bit weights meet, as `start` has it. int8: every format, that of the compute dtype too, is compared "
        "with the compute dtype and activations that are not rounded.",
        W4_ACTIVATIONS,
    )
    kv_key_bias: str = setting("auto", "How biased keys are stored, as `start` has it.", _CHOICES["kv_key_bias"])
    key_offset: float = setting(
        0.0,
        "Added to three channels of every key in the first and the last layer, as large biases are: it shows what "
        "storing them costs, inline and split. For fp32 compute.",
        low=0,
    )
    positions: int = setting(1534, "Teacher-forced positions that are compared.", low=1)
    window: int = setting(1024, "Tokens of each piece of the text, which begins with an empty context.", low=2)
    skip: int = setting(256, "Positions at the beginning of each piece that are not compared.", low=0)
    chunk: int = setting(256, "Tokens of a prefill chunk.", low=1)
    prompts: int = setting(20, f"Greedy continuations, each of {PROMPT_TOKENS} tokens of the text.", low=1)
    new_tokens: int = setting(64, "Tokens of a greedy continuation.", low=1)
    passkey_tokens: str = setting("256,512,1000", "Lengths of the passkey prompts, separated by commas.")
    passkey_depths: str = setting("0.1,0.5,0.9", "Where in them the key stands, from 0 to 1, separated by commas.")
    max_kld: float | None = setting(None, "Gate: greatest mean KL divergence in nats.", low=0)
    min_top1: float | None = setting(None, "Gate: least top-1 agreement in percent.", low=0, high=100)

    def check(self) -> None:
        """Raises ConfigError for the first value that cannot work."""
        check_values(self)
        if self.skip > self.window - 2:
            raise ConfigError(
                f"skip is {self.skip}; with window {self.window} it must be at most {self.window - 2}", "skip"
            )
        for name in self.format_names:
            try:
                resolve_kv_format(name)
            except ValueError as error:
                raise ConfigError(f"formats is {self.formats!r}: {error}", "formats") from error
        lengths, depths = self.lengths, self.depths
        if not lengths or min(lengths) < 1:
            raise ConfigError(f"passkey_tokens is {self.passkey_tokens!r}; it must hold positive integers")
        if not depths or not all(0 <= depth <= 1 for depth in depths):
            raise ConfigError(f"passkey_depths is {self.passkey_depths!r}; it must hold numbers from 0 to 1")

    @property
    def format_names(self) -> list[str]:
        if self.formats == "usual":
            return list(USUAL)
        if self.formats == "all":
            return [f"{k.name}/{v.name}" for k in CODECS for v in CODECS]
        return [name.strip() for name in self.formats.split(",")]

    @property
    def lengths(self) -> list[int]:
        return numbers_of(self, "passkey_tokens", int)

    @property
    def depths(self) -> list[float]:
        return numbers_of(self, "passkey_depths", float)
