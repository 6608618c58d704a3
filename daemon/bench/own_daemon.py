"""The daemon that a bench starts for itself: which of `start`'s settings a bench passes on."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.daemon.config import EngineConfig
from deepinfer.daemon.setting import ConfigError, check_values, setting, settings_of
from deepinfer.kernels import resolve_kv_format

DEVICES = settings_of(EngineConfig)["device"].metadata["choices"]
ROUNDS_HELP = "How often everything is measured, in turns."
PASSED_ON = ("model", "device", "threads")
FORMATS = "fp16,int8,fp8_e4m3,fp8_e5m2"


@dataclass(frozen=True, kw_only=True)
class OwnDaemon:
    """Settings that are not given are left to `start`."""

    model: str = setting("smollm2-135m", "A folder, a GGUF file, an alias, or a hub id.")
    device: str = setting("auto", "Where the model runs, as `start` has it.", DEVICES)
    threads: int | None = setting(None, "CPU threads of the engine. [default: all cores it may use]", low=1)
    kv_cache_dtype: str = setting("auto", "KV formats, separated by commas, each as `start` has it.")

    def check(self) -> None:
        """Raises ConfigError for the first value that cannot work."""
        check_values(self)
        for name in self.formats:
            try:
                resolve_kv_format(name, "fp32")
            except ValueError as error:
                raise ConfigError(f"kv_cache_dtype is {self.kv_cache_dtype!r}: {error}", "kv_cache_dtype") from error
        if len(set(self.formats)) < len(self.formats):
            raise ConfigError(f"kv_cache_dtype is {self.kv_cache_dtype!r}; it names a format twice", "kv_cache_dtype")

    @property
    def formats(self) -> list[str]:
        return [name.strip() for name in self.kv_cache_dtype.split(",")]

    def options(self, kv_format: str) -> list[str]:
        """Of `deepinfer-daemon start`."""
        given = {name: getattr(self, name) for name in PASSED_ON} | {"kv-cache-dtype": kv_format}
        return [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]
