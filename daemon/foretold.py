"""Which kernels a start will call for, as far as settings and the headers of the model say it. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from deepinfer.daemon.config import EngineConfig
from deepinfer.kernels.codecs import BF16, FP32
from deepinfer.kernels.cpu.ahead import Matrices, Needs
from deepinfer.kernels.cpu.records import P_BF16, P_INT4, P_INT8
from deepinfer.kernels.kv_formats import resolve_kv_format
from deepinfer.stages.model.config import GELU_TANH, PRE, ModelConfig
from deepinfer.stages.model.config_gguf import config_from_gguf
from deepinfer.stages.model.config_hf import config_from_folder
from deepinfer.stages.model.folder_names import CONFIG
from deepinfer.stages.model.gguf_header import GGUFHeader
from deepinfer.stages.model.gguf_split import read_model_header
from deepinfer.stages.model.json_fields import read_json

_KINDS = {"Q4_0": (P_INT4, False), "Q4_1": (P_INT4, False), "Q4_K": (P_INT4, True)}
_DENSE = Matrices(P_BF16, False, True), Matrices(P_BF16, False, False)
"""Of layers, and of the head, whose outputs are fp32."""
_TABLES = ("output.weight", "token_embd.weight")
"""The head is the first of these that a file has."""


def needs_of(config: EngineConfig, path: Path) -> Needs:
    """Of the model at `path`. Raises ModelError and ValueError for what the engine will refuse."""
    if path.is_dir():
        fields = read_json(path / CONFIG)
        in_fp32 = (fields.get("dtype") or fields.get("torch_dtype")) == "float32"
        matrices = () if "quantization_config" in fields else _DENSE
        return _needs(config, config_from_folder(path), in_fp32, matrices, False)
    header = read_model_header(path)
    model = config_from_gguf(header.metadata, header.tensors.keys(), {}, str(path))
    in_fp32 = {tensor.type_name for tensor in header.tensors.values() if len(tensor.shape) == 2} == {"F32"}
    return _needs(config, model, in_fp32, _matrices_of(header), True)


def _needs(
    config: EngineConfig, model: ModelConfig, in_fp32: bool, matrices: tuple[Matrices, ...], from_files: bool
) -> Needs:
    dtype = config.dtype if config.dtype != "auto" else "fp32" if in_fp32 else "bf16"
    kv_format = resolve_kv_format(config.kv_cache_dtype, compute_dtype=dtype)
    return Needs(
        activations=FP32 if dtype == "fp32" else BF16,
        k=kv_format.k,
        v=kv_format.v,
        head_dim=model.head_dim,
        group=model.num_q_heads // model.num_kv_heads,
        soft_cap=model.attention_soft_cap,
        gelu=model.activation == GELU_TANH,
        output_norms=model.norms != PRE,
        int8_activations=config.w4_activations == "int8",
        from_files=from_files,
        matrices=() if dtype == "fp32" else matrices,
    )


def _matrices_of(header: GGUFHeader) -> tuple[Matrices, ...]:
    """Those of layers, in the order of the file, then the head. An embedding that is the head keeps no 4-bit codes."""
    found = dict.fromkeys(
        Matrices(*_KINDS.get(tensor.type_name, (P_BF16, False)), True)
        for name, tensor in header.tensors.items()
        if len(tensor.shape) == 2 and name not in _TABLES
    )
    head = next(name for name in _TABLES if name in header.tensors)
    type_name = header.tensors[head].type_name
    if type_name == "Q8_0":
        return *found, Matrices(P_INT8, False, False)
    is_own = head == _TABLES[0] and type_name in _KINDS
    return *found, Matrices(*(_KINDS[type_name] if is_own else (P_BF16, False)), False)
