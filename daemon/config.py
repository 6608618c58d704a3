"""The daemon's configuration: one frozen dataclass, which is the only place of a default.

The command line is generated from it, so an option, its help and its default are written once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.daemon.runtime_folder import FolderError, require_private
from deepinfer.stages.preemption import MODES

BLOCK_SIZES = (8, 16, 32, 64, 128)
"""Tokens; those that the attention kernels are compiled for."""


VICTIMS = ("lru", "smallest", "youngest")


class ConfigError(ValueError):
    """A setting that cannot work. The message names the setting, its value and what would be right."""


def setting(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine needs to know. Travels to the engine process as JSON."""

    model: str = setting("smollm2-135m", "A folder, a GGUF file, an alias, or a hub id.")
    device: str = setting(
        "auto",
        "Where the model runs. host-emulation is the CUDA kernels on the CPU, for tests.",
        ("auto", "cpu", "cuda", "host-emulation"),
    )
    dtype: str = setting("auto", "Compute dtype.", ("auto", "fp32", "bf16"))
    kv_cache_dtype: str = setting("auto", "KV format: auto, fp16, int8, fp8_e4m3, fp8_e5m2, or a pair K/V.")
    kv_key_bias: str = setting(
        "auto",
        "Where key biases go: inline into the stored keys, split from them, or auto, what a layer needs.",
        ("auto", "inline", "split"),
    )
    block_size: int = setting(16, "Tokens of one KV block.")
    num_blocks: int | None = setting(None, "KV blocks of the pool. Default: from the memory at hand.")
    max_cache: int | None = setting(None, "Tokens that the pool holds. Another way to say --num-blocks.")
    max_context: int | None = setting(None, "Longest context of a request. Default: the model's.")
    prefix_cache: bool = setting(True, "Share the KV blocks of common prompt beginnings.")
    max_running: int = setting(64, "Requests that hold KV blocks at the same time.")
    prefill_chunk_tokens: int = setting(256, "Prompt tokens computed between two decode steps.")
    batch_invariant: bool = setting(False, "Bit-equal results alone, in a batch, chunked or swapped; slower.")
    attention: str = setting("auto", "Attention path.", ("auto", "numba", "reference"))
    w4_prefill: str = setting(
        "bf16-copy", "How 4-bit weights meet many rows: a bf16 copy, or int4 always.", ("bf16-copy", "int4")
    )
    threads: int | None = setting(None, "CPU threads of the engine. Default: all cores it may use.")
    cpu_offload: bool = setting(True, "Swap requests to host memory when the pool is full.")
    max_cpu_offload_mb: int = setting(2048, "Host memory for swapped requests, in MiB.")
    preemption: str = setting(
        "swap",
        "How requests make room: swap them, and compute them again when the host is full; swap-only, never compute "
        "again; recompute, never swap; auto, whichever is measured to be faster.",
        MODES,
    )
    victims: str = setting(
        "lru", "Who is swapped out first: the least recently active, the smallest, or the youngest.", VICTIMS
    )
    verify_payloads: bool = setting(False, "Check a checksum of every swapped block when it comes back.")
    residency_quantum: int = setting(4, "Tokens that a request yields before it may be preempted.")
    max_parks: int = setting(8, "Preemptions after which a request is never preempted again.")

    def check(self) -> None:
        """Raises ConfigError for the first value that cannot work."""
        at_least_one = ("max_running", "prefill_chunk_tokens", "residency_quantum", "max_parks")
        for name in (*at_least_one, "num_blocks", "max_cache", "max_context", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.block_size not in BLOCK_SIZES:
            known = ", ".join(map(str, BLOCK_SIZES))
            raise ConfigError(f"block_size is {self.block_size}; it must be one of: {known}")
        if self.max_context == 1:
            raise ConfigError("max_context is 1; a prompt token and an answer need at least 2")
        if self.max_cpu_offload_mb < 0:
            raise ConfigError(f"max_cpu_offload_mb is {self.max_cpu_offload_mb}; it must be 0 or more")
        if self.num_blocks is not None and self.max_cache is not None:
            raise ConfigError("num_blocks and max_cache say the same thing; give one of them")
        for field in dataclasses.fields(self):
            choices = field.metadata["choices"]
            if choices and getattr(self, field.name) not in choices:
                known = ", ".join(choices)
                raise ConfigError(f"{field.name} is {getattr(self, field.name)!r}; it must be one of: {known}")


@dataclass(frozen=True, kw_only=True)
class DaemonConfig(EngineConfig):
    """What `start` needs to know besides."""

    endpoint: str | None = setting(None, "Client endpoint, such as tcp://127.0.0.1:5555. Default: ipc.")
    max_queue: int = setting(2048, "Live requests at the same time; one more is refused with queue_full.")
    start_timeout_s: int = setting(600, "Seconds that the engine may take to become ready.")
    drain_s: int = setting(30, "Seconds that running requests get to finish after SIGTERM.")

    def check(self) -> None:
        super().check()
        for name in ("max_queue", "start_timeout_s"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.drain_s < 0:
            raise ConfigError(f"drain_s is {self.drain_s}; it must be 0 or more")
        if self.endpoint is not None:
            check_endpoint(self.endpoint)

    def engine(self) -> EngineConfig:
        names = {field.name for field in dataclasses.fields(EngineConfig)}
        return EngineConfig(**{name: getattr(self, name) for name in names})


def check_endpoint(endpoint: str) -> None:
    """Only ipc in a private folder and loopback TCP: anything wider would be open to others. Raises ConfigError."""
    if endpoint.startswith("ipc://"):
        _check_ipc(endpoint)
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not (port == "*" or (port.isdigit() and 0 < int(port) < 65536)):
        raise ConfigError(
            f"endpoint is {endpoint!r}; it must be ipc://PATH or tcp://127.0.0.1:PORT, with a port from 1 to 65535 or *"
        )
    if host not in ("127.0.0.1", "localhost", "[::1]"):
        raise ConfigError(
            f"endpoint is {endpoint!r}; {host or 'every interface'} is not a loopback address, and without encryption "
            "the daemon listens on loopback or ipc only"
        )


def _check_ipc(endpoint: str) -> None:
    path = Path(endpoint.removeprefix("ipc://"))
    if not path.is_absolute():
        raise ConfigError(
            f"endpoint is {endpoint!r}; it must name an absolute path (abstract sockets, with @, are open to everyone)"
        )
    try:
        require_private(path.parent)
    except FolderError as error:
        raise ConfigError(f"endpoint is {endpoint!r}; its folder is not private: {error}") from error
    if not path.parent.is_dir():
        raise ConfigError(f"endpoint is {endpoint!r}; the folder {path.parent} does not exist")
