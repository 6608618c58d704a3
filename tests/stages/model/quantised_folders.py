"""Writes tiny quantised Hugging Face folders, each word put together bit by bit as its format's documentation says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save
from transformers import PreTrainedModel

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


class Quantised(NamedTuple):
    codes: torch.Tensor
    """int64 [M, K], 0 to 15."""
    scales: torch.Tensor
    """[M, G], of the dtype that the file has."""
    zeros: torch.Tensor
    """int64 [M, G]."""
    group_of: torch.Tensor
    """int64 [K]."""

    def weight(self) -> torch.Tensor:
        """float32 [M, K]: the definition, one weight at a time."""
        scales, zeros = self.scales.float()[:, self.group_of], self.zeros[:, self.group_of]
        return scales * (self.codes - zeros).float()


def quantise(
    weight: torch.Tensor,
    group: int,
    symmetric: bool = False,
    dtype: torch.dtype = torch.float16,
    group_of: torch.Tensor | None = None,
) -> Quantised:
    """`weight` [M, K] to the nearest of 16 steps of its group; `group` -1 is a whole row."""
    rows, columns = weight.shape
    size = columns if group == -1 else group
    if group_of is None:
        group_of = torch.arange(columns) // size
    index, nothing = group_of.expand(rows, -1), torch.zeros(rows, int(group_of.max()) + 1)
    low, high = nothing.scatter_reduce(1, index, weight, "amin"), nothing.scatter_reduce(1, index, weight, "amax")
    if symmetric:
        scales, zeros = (torch.maximum(-low, high) / 7.5).to(dtype), torch.full_like(low, 8).long()
    else:
        scales = ((high - low) / 15).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, 15).long()
    wide, zero = scales.float()[:, group_of], zeros[:, group_of]
    codes = ((weight / wide).round().long() + zero).clamp(0, 15)
    return Quantised(codes, scales, zeros, group_of)


def words(values: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """[n, 8 m] of 0 to 15 to int32 [n, m]: bits 4 i to 4 i + 3 of a word are value `order[i]` of its eight."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % 8))
    out = torch.zeros(len(padded), padded.shape[1] // 8, dtype=torch.int64)
    for bit, which in enumerate(order):
        out |= padded[:, which::8] << 4 * bit
    return torch.where(out >= 2**31, out - 2**32, out).int()


def awq_parts(prefix: str, q: Quantised) -> Tensors:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{prefix}.qweight": words(q.codes.T, order),
        f"{prefix}.qzeros": words(q.zeros.T, order),
        f"{prefix}.scales": q.scales.T.contiguous(),
    }


def gptq_parts(prefix: str, q: Quantised, version: int = 1) -> Tensors:
    zeros = words(q.zeros.T).long()
    if version == 1:  # Less 1 in every nibble, as one subtraction of the word.
        zeros = (zeros - 0x11111111) % 2**32
        zeros = torch.where(zeros >= 2**31, zeros - 2**32, zeros)
    return {
        f"{prefix}.qweight": words(q.codes).T.contiguous(),
        f"{prefix}.qzeros": zeros.int(),
        f"{prefix}.scales": q.scales.T.contiguous(),
        f"{prefix}.g_idx": q.group_of.int(),
    }


def pack_quantized_parts(prefix: str, q: Quantised, symmetric: bool) -> Tensors:
    parts = {
        f"{prefix}.weight_packed": words(q.codes),
        f"{prefix}.weight_scale": q.scales,
        f"{prefix}.weight_shape": torch.tensor(q.codes.shape),
    }
    if not symmetric:
        parts[f"{prefix}.weight_zero_point"] = words(q.zeros.T).T.contiguous()
    return parts


def awq_config(group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", **more}


def gptq_config(group: int, sym: bool, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": sym, "desc_act": False, **more}


def compressed_config(group: int, symmetric: bool, **weights: Any) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    own = {"num_bits": 4, "type": "int", "symmetric": symmetric, **strategy, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": own}},
        "ignore": ["lm_head"],
    }


class QuantisedFolder:
    """A model saved as transformers does, its linear layers replaced by quantised parts. `weights` holds what those
    mean, float32 by name; `tensors` may be changed before `write`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: Path,
        quantised: Callable[[torch.Tensor], Quantised],
        parts: Callable[[str, Quantised], Tensors],
        config: dict[str, Any],
        dense: Sequence[str] = (),
        linears: Sequence[str] = LINEARS,
    ):
        self.folder = save(model, folder, torch.float16)
        self.config = config
        self.tensors = load_file(folder / "model.safetensors")
        self.weights: Tensors = {}
        for name in list(self.tensors):
            prefix = name.removesuffix(".weight")
            if prefix.rsplit(".", 1)[-1] in linears and not any(part in name for part in dense):
                q = quantised(self.tensors.pop(name).float())
                self.weights[name] = q.weight()
                self.tensors |= parts(prefix, q)

    def write(self) -> Path:
        save_file(self.tensors, self.folder / "model.safetensors", metadata={"format": "pt"})
        path = self.folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": self.config}))
        return self.folder


def shuffled(weight: torch.Tensor, seed: int = 1) -> Quantised:
    """As act-order leaves them: the columns of a group lie anywhere."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
    return quantise(weight, 64, group_of=(torch.arange(weight.shape[1]) // 64)[order])


def act_order(model: PreTrainedModel, folder: Path) -> QuantisedFolder:
    return QuantisedFolder(model, folder, shuffled, gptq_parts, gptq_config(64, False, desc_act=True))
