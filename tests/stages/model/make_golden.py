"""Writes tests/stages/model/golden: matrices that gptqmodel quantised, and the hashes of what it dequantises them to.

gptqmodel 7.7 asks for a newer torch than ours, so it is no development dependency. Run this where it is installed
(`pip install --no-deps gptqmodel` and what it imports) and `deepinfer` can be imported, with GPTQMODEL_CPU_WORKERS=3 on
two cores. It takes a minute, on the CPU.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # type: ignore[import-not-found]
from gptqmodel.quantization import FORMAT, METHOD  # type: ignore[import-not-found]
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[2]))
from tiny import save_tiny_family

FOLDER = Path(__file__).parent / "golden"
KEPT = ("self_attn.k_proj", "mlp.down_proj")
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.3,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gptq": {"sym": True, "desc_act": False, "group_size": 64},
    "gptq-act-order": {"sym": True, "desc_act": True, "group_size": 32},
    "gptq-v2-act-order": {"sym": False, "desc_act": True, "group_size": 32, "format": FORMAT.GPTQ_V2},
    "gptq-asymmetric": {"sym": False, "desc_act": False, "group_size": 128},
    "awq": {"group_size": 32, "quant_method": METHOD.AWQ, "format": FORMAT.GEMM},
}
TEXTS = [f"Line {number} of a text that says nothing, but says it in other words each time." for number in range(16)]


def dequantised(module: Any) -> torch.Tensor:
    """fp16 [rows, columns]."""
    if hasattr(module, "dequantize_weight"):
        return module.dequantize_weight().T.contiguous()
    return dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, module.group_size).T.contiguous()


def write(name: str, settings: dict[str, Any], source: Path, folder: Path) -> dict[str, Any]:
    model = GPTQModel.load(str(source), QuantizeConfig(device="cpu", bits=4, **settings))
    model.quantize(TEXTS, batch_size=1)
    model.save(str(folder))
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {key: tensor for key, tensor in tensors.items() if any(f".{part}." in key for part in KEPT)},
        FOLDER / f"{name}.safetensors",
    )
    loaded = GPTQModel.load(str(folder), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
    hashes = {
        f"{prefix}.weight": hashlib.sha256(dequantised(module).half().numpy().tobytes()).hexdigest()
        for prefix, module in loaded.model.named_modules()
        if prefix.endswith(KEPT)
    }
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    wanted = ("quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "version")
    return {"config": {key: config[key] for key in wanted if key in config}, "sha256": hashes}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source = save_tiny_family(Path(scratch) / "source", "llama", **SIZES)
        found = {name: write(name, kw, source, Path(scratch) / name) for name, kw in VARIANTS.items()}
    written = {"written_by": f"gptqmodel {version('gptqmodel')}", "variants": found}
    (FOLDER / "quantised.json").write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
