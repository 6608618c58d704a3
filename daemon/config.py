"""The daemon's configuration: one frozen dataclass, which is the only place of a default.

The command line, the environment variables and the keys of the configuration file are generated from it, so a setting,
its help, its range and its default are written once.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.daemon.endpoints import check_endpoint
from deepinfer.daemon.log import FORMATS, LEVELS
from deepinfer.daemon.setting import ConfigError, check_values, setting, settings_of
from deepinfer.stages.preemption import MODES
from deepinfer.stages.protocol_limits import Limits

__all__ = ["BLOCK_SIZES", "ConfigError", "DaemonConfig", "EngineConfig", "LimitsConfig", "setting"]

BLOCK_SIZES = (8, 16, 32, 64, 128)
"""Tokens; those that the attention kernels are compiled for."""


LIMITS = Limits()
LOOPBACK = ("127.0.0.1", "localhost", "::1")
VICTIMS = ("lru", "smallest", "youngest")
OFFLOAD_UNITS = ("request", "block")
W4_ACTIVATIONS = ("auto", "int8")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine needs to know. Travels to the engine process as JSON."""

    model: str = setting("smollm2-135m", "A folder, a GGUF file, an alias, or a hub id.", aliases=("--model-path",))
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
    block_size: int = setting(16, "Tokens of one KV block.", aliases=("--page-size",))
    num_blocks: int | None = setting(
        None,
        "KV blocks of the pool. Default: from the memory at hand.",
        low=1,
        aliases=("--num-gpu-blocks-override",),
    )
    max_cache: int | None = setting(
        None, "Tokens that the pool holds. Another way to say --num-blocks.", low=1, aliases=("--max-total-tokens",)
    )
    gpu_memory_fraction: float | None = setting(
        None,
        "Share of the GPU's memory that the engine takes in all. Default: all but a margin of 256 MiB or 6 %.",
        low=0.01,
        high=1.0,
        aliases=("--mem-fraction-static", "--gpu-memory-utilization"),
    )
    max_context: int | None = setting(
        None,
        "Longest context of a request, prompt and answer. Default: the model's.",
        low=2,
        aliases=("--context-length", "--max-model-len"),
    )
    prefix_cache: bool = setting(
        True,
        "Share the KV blocks of common prompt beginnings.",
        aliases=("--enable-prefix-caching/--disable-radix-cache",),
    )
    max_running: int = setting(
        64,
        "Requests that hold KV blocks at the same time.",
        low=1,
        aliases=("--max-running-requests", "--max-num-seqs"),
    )
    prefill_chunk_tokens: int = setting(
        256,
        "Prompt tokens computed between two decode steps. On the CPU twice as many while nothing decodes.",
        low=1,
        aliases=("--chunked-prefill-size", "--max-num-batched-tokens"),
    )
    batch_invariant: bool = setting(False, "Bit-equal results alone, in a batch, chunked or swapped; slower.")
    attention: str = setting(
        "auto", "Attention path.", ("auto", "numba", "reference"), aliases=("--attention-backend",)
    )
    cuda_graphs: bool = setting(True, "Capture decode steps in CUDA graphs. Without effect on the CPU.")
    w4_prefill: str = setting(
        "auto",
        "How 4-bit weights meet many rows: rounded to bf16, which takes 2 bytes a weight more where the processor has "
        "no AMX, or as they are.",
        ("auto", "bf16", "int4"),
    )
    w4_activations: str = setting(
        "auto",
        "What 4-bit weights are multiplied with: activations in the compute dtype, or rounded to 8 bits, each 32 by a "
        "scale of their own, which is faster for many rows and less exact. CPU only.",
        W4_ACTIVATIONS,
    )
    threads: int | None = setting(None, "CPU threads of the engine. Default: all cores it may use.", low=1)
    cpu_offload: bool = setting(True, "Swap requests to host memory when the pool is full.")
    max_cpu_offload_mb: int = setting(2048, "Host memory for swapped requests, in MiB.", low=0)
    preemption: str = setting(
        "swap",
        "How requests make room: swap them, and compute them again when the host is full; swap-only, never compute "
        "again; recompute, never swap; auto, whichever is measured to be faster.",
        MODES,
    )
    offload_unit: str = setting(
        "request",
        "What is swapped when a request must make room: all of it, or only as many of its blocks as are needed.",
        OFFLOAD_UNITS,
    )
    victims: str = setting(
        "lru", "Who is swapped out first: the least recently active, the smallest, or the youngest.", VICTIMS
    )
    verify_payloads: bool = setting(False, "Check a checksum of every swapped block when it comes back.")
    residency_quantum: int = setting(4, "Tokens that a request yields before it may be preempted.", low=1)
    max_parks: int = setting(8, "Preemptions after which a request is never preempted again.", low=1)

    log_level: str = setting("info", "What is logged: this and what is worse.", LEVELS, live=True)
    log_format: str = setting("auto", "Lines for people, JSON lines, or auto: JSON where it is no terminal.", FORMATS)

    def check(self) -> None:
        """Raises ConfigError for the first value that cannot work."""
        check_values(self)
        if self.block_size not in BLOCK_SIZES:
            known = ", ".join(map(str, BLOCK_SIZES))
            raise ConfigError(f"block_size is {self.block_size}; it must be one of: {known}")
        if self.num_blocks is not None and self.max_cache is not None:
            raise ConfigError("num_blocks and max_cache say the same thing; give one of them")
        if self.w4_activations != "auto" and self.w4_prefill == "bf16":
            raise ConfigError(
                f"w4_activations is {self.w4_activations!r} and w4_prefill 'bf16': 4-bit weights in bf16 "
                "do not meet such activations; leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """What requests may measure. The defaults are those of the protocol."""

    max_frame_bytes: int = setting(LIMITS.max_frame_bytes, "Bytes of one frame.", low=4096, high=2**31 - 1)
    max_map_bytes: int = setting(
        LIMITS.max_map_bytes, "Bytes of a request without its texts and ids.", low=1024, live=True
    )
    max_fields: int = setting(LIMITS.max_fields, "Fields of a request.", low=32, live=True)
    max_id_chars: int = setting(LIMITS.max_id_chars, "Characters of a request's id.", low=1, live=True)
    max_prompt_chars: int = setting(LIMITS.max_prompt_chars, "Characters of a prompt or a chat.", low=1, live=True)
    max_prompt_ids: int = setting(LIMITS.max_prompt_ids, "Token ids of a prompt.", low=1, live=True)
    max_messages: int = setting(LIMITS.max_messages, "Messages of a chat.", low=1, live=True)
    max_new_tokens: int = setting(LIMITS.max_new_tokens, "New tokens of a request.", low=1, live=True)
    max_choices: int = setting(LIMITS.max_choices, "Answers to one request.", low=1, live=True)
    max_stops: int = setting(LIMITS.max_stops, "Stop strings of a request.", low=1, live=True)
    max_stop_chars: int = setting(LIMITS.max_stop_chars, "Characters of a stop string.", low=1, live=True)
    max_stop_token_ids: int = setting(LIMITS.max_stop_token_ids, "Stop token ids of a request.", low=0, live=True)
    max_logit_bias: int = setting(LIMITS.max_logit_bias, "Entries of a logit bias.", low=0, live=True)
    max_logprobs: int = setting(LIMITS.max_logprobs, "Likeliest tokens told with each token.", low=0, live=True)
    max_deadline_ms: int = setting(LIMITS.max_deadline_ms, "Milliseconds of a deadline.", low=1, live=True)
    max_streams: int = setting(LIMITS.max_streams, "Live requests of one connection.", low=1, live=True)
    max_queue: int = setting(
        LIMITS.max_queue,
        "Live requests at the same time; one more is refused with queue_full.",
        low=1,
        aliases=("--max-queued-requests",),
        live=True,
    )

    def limits(self) -> Limits:
        return Limits(**{name: getattr(self, name) for name in settings_of(LimitsConfig)})


@dataclass(frozen=True, kw_only=True)
class DaemonConfig(LimitsConfig, EngineConfig):
    """What `start` needs to know besides."""

    endpoint: str | None = setting(None, "Client endpoint, such as tcp://127.0.0.1:5555. Default: ipc.")
    control_endpoint: str | None = setting(
        None, "Another address of the control socket, such as tcp://10.0.0.2:5556, beside the one for this user."
    )
    metrics_endpoint: str | None = setting(
        None, "Another address for subscribers, such as tcp://10.0.0.2:5557, beside the one for this user."
    )
    curve: bool = setting(
        False, "Encrypt, and let in listed clients only, also on loopback and ipc. Other addresses always do."
    )
    keys_dir: str | None = setting(None, "Folder of the CURVE keys. Default: keys in the configuration folder.")
    start_timeout_s: int = setting(600, "Seconds that the engine may take to become ready.", low=1)
    max_restarts: int = setting(
        3, "Engine restarts in a row, without a token in between, after which the daemon gives up. 0 is never.", low=0
    )
    hang_timeout_s: int = setting(
        30,
        "Seconds that a stage of the engine may have work and not move before the engine is killed and started again; "
        "at half of it, status says hung.",
        low=2,
    )
    restart_window_s: int = setting(60, "Seconds that an engine must have been ready to end such a row.", low=0)
    drain_s: int = setting(30, "Seconds that running requests get to finish after SIGTERM.", low=0, live=True)
    log_prompts: bool = setting(False, "Log the prompts of requests, which nothing else does.", live=True)
    metrics_interval_ms: int = setting(1000, "Milliseconds between two metric snapshots to subscribers.", low=50)
    prometheus_port: int | None = setting(
        None, "HTTP port that Prometheus scrapes; 0 takes a free one. Default: off.", low=0, high=65535
    )
    prometheus_host: str = setting("127.0.0.1", "Loopback address of that port.", LOOPBACK)

    def check(self) -> None:
        super().check()
        for name in ("endpoint", "control_endpoint", "metrics_endpoint"):
            if getattr(self, name) is not None:
                check_endpoint(name, getattr(self, name))

    def engine(self) -> EngineConfig:
        return EngineConfig(**{name: getattr(self, name) for name in settings_of(EngineConfig)})
