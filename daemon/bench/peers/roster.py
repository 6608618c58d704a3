"""Which peers there are: the adapter of each, and what it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.daemon.bench.peers.process import PeerFailed, PeerProcess

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    name: str
    package: str
    """To install it."""
    adapter: Path | None = None
    """None: there is no adapter for it, so it is named and not measured."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For the adapter's `load`, besides model, threads, streams and tokens."""


def _transformers(name: str, dtype: str, continuous: bool) -> Peer:
    options = {"dtype": dtype, "continuous": continuous}
    return Peer(name, "transformers", HERE / "adapter_transformers.py", options)


def _openvino(name: str, rounds_activations: bool) -> Peer:
    return Peer(name, "openvino-genai", HERE / "adapter_openvino.py", {"rounds_activations": rounds_activations})


TRANSFORMERS_FP32 = _transformers("transformers-fp32", "fp32", False)
PEERS = (
    TRANSFORMERS_FP32,
    _transformers("transformers-bf16", "bf16", False),
    _transformers("transformers-cb", "bf16", True),
    Peer("llama.cpp", "llama-cpp-python", HERE / "adapter_llama_cpp.py"),
    _openvino("openvino", True),
    _openvino("openvino-bf16", False),
    Peer("vllm", "vllm"),
    Peer("sglang", "sglang"),
)


def start_peer(peer: Peer, python: str, options: dict[str, Any], answer_seconds: float) -> PeerProcess:
    """Ready to run. `options`: model, threads, streams and tokens. Raises PeerFailed."""
    if peer.adapter is None:
        raise PeerFailed("no adapter")
    try:
        return PeerProcess(python, peer.adapter, {**options, **peer.options}, answer_seconds)
    except PeerFailed as error:
        hint = f" (pip install {peer.package}, or --peer-python {peer.name}=PATH)"
        raise PeerFailed(f"{error}{hint if 'ModuleNotFoundError' in str(error) else ''}") from None
