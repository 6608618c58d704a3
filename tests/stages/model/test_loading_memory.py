"""Loading streams: at no time is much more held than the model, and the tensor that is being read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import GGUFModelFile
from peak_memory import WATCH
from tiny_checkpoints import save, tiny_model

MEASURE = f"""{WATCH}
from deepinfer.stages.model import load_model, open_checkpoint

load_model(open_checkpoint(sys.argv[1]), "bf16")
with watched() as grown:
    model = load_model(open_checkpoint(sys.argv[2]), "bf16")
print(len(grown), model.weight_bytes, max(grown))
"""
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
SLACK = 6 << 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory as Linux shows it")
@pytest.mark.parametrize("kind", ["BF16 folder", "Q8_0 file", "Q6_K file", "Q4_1 file"])
def test_the_most_that_loading_holds_is_the_model_and_its_largest_tensor(kind: str, tmp_path: Path) -> None:
    paths = []
    for name, vocab in (("small", 160), ("large", 40960)):
        model = tiny_model("llama", **SIZES, vocab_size=vocab)
        if kind == "BF16 folder":
            paths.append(save(model, tmp_path / name, torch.bfloat16))
            largest = 2 * 512 * vocab
        else:
            type_name = kind.split()[0]
            paths.append(GGUFModelFile(tmp_path / name, model, "llama", type_name).write())
            weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
            largest = size * 512 * vocab // weights
    shown = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, paths)], capture_output=True, text=True, check=True
    ).stdout
    samples, final, grown = map(int, shown.split()[-3:])
    assert samples > 5
    assert final < grown < final + largest + SLACK
