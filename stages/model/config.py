"""What a decoder-only model is, whatever file format it came in: sizes, and the switches that families set."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.stages.model.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
MAX_INTEGER = 2**40
"""No size that a file states reaches it."""
MAX_LAYERS = 1000
"""More than any model has; a damaged file must not make us build tables for a billion layers."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of layers, as config.json names them."""
SILU, GELU_TANH = "silu", "gelu_tanh"
"""Of the gate; gelu_tanh is the tanh form of gelu."""
PRE, POST, BOTH = "pre", "post", "both"
NORMS: dict[str, dict[str, str]] = {
    PRE: {"input": "input_layernorm", "mlp": "post_attention_layernorm"},
    POST: {"attention_out": "post_attention_layernorm", "mlp_out": "post_feedforward_layernorm"},
    BOTH: {
        "input": "input_layernorm",
        "attention_out": "post_attention_layernorm",
        "mlp": "pre_feedforward_layernorm",
        "mlp_out": "post_feedforward_layernorm",
    },
}
"""Where a layer has norms, and their Hugging Face names: before attention and MLP ("input", "mlp"), or on what they
give, before that is added to the residual stream."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding, halves rotated ("neox"). Formulas: `stages.model.rope`."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    """Context before it was stretched (llama3, yarn, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn, longrope)."""
    frequency_divisors: tuple[float, ...] = ()
    """One for each frequency: of longrope, or from a GGUF file (`rope_freqs.weight`) in place of the llama3 formula."""
    long_divisors: tuple[float, ...] = ()
    """Those of longrope for contexts beyond the original one."""
    rotated: int = 0
    """How many elements of a head are rotated, its first ones; 0: all of them."""

    def size(self, head_dim: int) -> int:
        """Of what is rotated."""
        return self.rotated or head_dim

    def is_long(self, context: int) -> bool:
        """Whether positions of a context of so many tokens, the early ones too, have the frequencies of long ones."""
        return bool(self.long_divisors) and context > self.original_max_positions

    def named(self, context: int) -> str:
        """As `status` has it."""
        said = [self.rope_type]
        if self.long_divisors:
            said.append(f"{'long' if self.is_long(context) else 'short'} factors")
        if self.rotated:
            said.append(f"{self.rotated} elements of each head")
        return ", ".join(said)


@dataclass(frozen=True)
class ModelConfig:
    family: str
    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """Rows of the embedding. Padding rows may be among them: the tokenizer knows how many ids are valid."""
    max_context: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int, ...]
    """Per layer: a row attends to its own token and the window - 1 before it; 0 = all."""
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""
    """RMS norms before RoPE: "head", of every query and key head; "projection", of all of q and of all of k."""
    norms: str = PRE
    """Which of `NORMS` a layer has."""
    norm_offset: float = 0.0
    """Added to the weights of all norms when they are loaded: files may store w and mean 1 + w."""
    activation: str = SILU
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    """Of the scores; 0: one over the square root of head_dim."""
    attention_soft_cap: float = 0.0
    """Scores s become cap * tanh(s / cap) before they are masked; 0: they stay as they are."""
    logit_soft_cap: float = 0.0
    """The same for the logits."""
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    """Per layer, None where nothing is rotated (NoPE). Empty: `rope` in all layers."""
    fused_projections: bool = False
    """Files hold q, k and v as one matrix, gate and up as another."""

    @property
    def score_scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5

    @property
    def norm_names(self) -> dict[str, str]:
        return NORMS[self.norms]

    def rope_of(self, layer: int) -> RopeConfig | None:
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    @property
    def distinct_ropes(self) -> tuple[RopeConfig, ...]:
        """Those that some layer has, in the order of layers: each needs tables of its own."""
        ropes = [self.rope_of(layer) for layer in range(self.num_layers)]
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None)) or (self.rope,)

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def describe(self) -> dict[str, object]:
        """Plain values for `status` and the start-up summary."""
        windows = sorted({w for w in self.windows if w})
        return {
            "family": self.family,
            "layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "q_heads": self.num_q_heads,
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_context": self.max_context,
            "rope": self.rope.rope_type,
            "layers_without_rope": sum(rope is None for rope in self.layer_ropes),
            "sliding_windows": windows,
            "sliding_layers": sum(window > 0 for window in self.windows),
            "soft_caps": {"attention": self.attention_soft_cap, "logits": self.logit_soft_cap},
            "tied_head": self.tie_word_embeddings,
        }


def check_sizes(layers: int, q_heads: int, kv_heads: int, head_dim: int, where: str) -> None:
    """Raises CheckpointError, naming the file `where`, for sizes that no model of these families can have."""
    if layers > MAX_LAYERS:
        raise CheckpointError(f"{where}: {layers} layers, expected at most {MAX_LAYERS}")
    if q_heads % kv_heads:
        raise CheckpointError(f"{where}: {q_heads} attention heads are no multiple of {kv_heads} key-value heads")
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(f"{where}: the head size is {head_dim}, expected a positive even number")


def check_rotated(rotated: int, head_dim: int, what: str) -> None:
    """Raises CheckpointError, which begins with `what`, for a number of elements that are no pairs of a head's."""
    if not 0 < rotated <= head_dim or rotated % 2:
        raise CheckpointError(f"{what} rotates {rotated} of the {head_dim} elements of a head, expected an even number")


def check_divisors(rope: RopeConfig, head_dim: int, where: str) -> None:
    """Raises CheckpointError, naming the file `where`."""
    wanted = rope.size(head_dim) // 2
    for divisors in (rope.frequency_divisors, rope.long_divisors):
        if len(divisors) not in (0, wanted):
            raise CheckpointError(f"{where}: RoPE has {len(divisors)} factors, expected {wanted}")


def context_length(rope: RopeConfig, stated: int, where: str) -> int:
    """yarn reaches factor times the original context, also where the checkpoint states the original one. Raises
    CheckpointError, naming the file `where`, when that is more than any model has.
    """
    if rope.rope_type != "yarn":
        return stated
    stretched = rope.original_max_positions * rope.factor
    if stretched >= MAX_INTEGER:
        raise CheckpointError(
            f"{where}: yarn's factor {rope.factor} times {rope.original_max_positions} original positions is too much"
        )
    return max(stated, int(stretched))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter by its Hugging Face name: [out, in]. A tied `lm_head.weight` is left out."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    linears = {
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    if config.fused_projections:
        linears["self_attn.qkv_proj"] = (q + 2 * kv, hidden, config.qkv_bias)
        linears["mlp.gate_up_proj"] = (2 * inner, hidden, config.mlp_bias)
    else:
        for part, size in zip("qkv", (q, kv, kv), strict=True):
            linears[f"self_attn.{part}_proj"] = (size, hidden, config.qkv_bias)
        for part in ("gate", "up"):
            linears[f"mlp.{part}_proj"] = (inner, hidden, config.mlp_bias)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in config.norm_names.values()}
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        whole = config.qk_norm == "projection"
        shapes["self_attn.q_norm.weight"] = (q if whole else config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (kv if whole else config.head_dim,)
    return shapes
