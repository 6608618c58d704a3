"""The peer of `bench serving`: transformers' own `generate` in float32, in a process of its own.

Reads one JSON job a line from standard input ({"prompt": [ids], "new_tokens": n}), answers each with one JSON line
({"seconds": s}), ends with its input. The model is read from the same file that the daemon serves.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def load(path: Path) -> PreTrainedModel:
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
    # from_pretrained asks for the package accelerate when it reads GGUF; these are the steps that it takes with it.
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def generate(model: Any, prompt: list[int], new_tokens: int) -> float:
    """Seconds of greedy decoding; end tokens do not end it."""
    ids = torch.tensor([prompt])
    began = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )
    return time.perf_counter() - began


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    model = load(Path(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps({"seconds": generate(model, job["prompt"], job["new_tokens"])}), flush=True)


if __name__ == "__main__":
    main()
