"""What a family of models is to this engine: how its files say what it is, and how it differs from llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer.stages.model.config import ModelConfig
from deepinfer.stages.model.gguf_keys import GGUFKeys
from deepinfer.stages.model.json_fields import ConfigFields

GGUF_TENSORS: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Of a layer: the name in a GGUF file, and the Hugging Face name of the same tensor."""


def as_it_is(config: ModelConfig, source: object) -> ModelConfig:
    return config


@dataclass(frozen=True)
class Family:
    """Everything that is said here is said about one `model_type`; what is left out is as llama has it.

    `from_json` and `from_gguf` get what is common to all families, read and checked, and give it back with the switches
    of `ModelConfig` that the family sets. Further fields they read from `ConfigFields` and `GGUFKeys`, whose errors
    name file and field.
    """

    name: str
    """`model_type` in config.json."""
    defaults: Mapping[str, Any]
    """Of fields that config.json leaves out: those of the transformers configuration class. A test compares."""
    from_json: Callable[[ModelConfig, ConfigFields], ModelConfig] = as_it_is
    activation_field: str = "hidden_act"
    architecture: str = ""
    """`general.architecture` of its GGUF files. Empty: they come under the name of another family."""
    from_gguf: Callable[[ModelConfig, GGUFKeys], ModelConfig] = as_it_is
    gguf_tensors: Mapping[str, str] = field(default_factory=dict)
    """What its layers have beside or instead of `GGUF_TENSORS`."""
    interleaved_gguf: bool = False
    """Its GGUF files hold the rows of q and k for a RoPE of neighbouring pairs."""
    partial_rope: bool = False
    """It may rotate the first elements of a head only. Then its queries and keys have no norms."""

    def gguf_layer_tensors(self) -> dict[str, str]:
        return {**GGUF_TENSORS, **self.gguf_tensors}
