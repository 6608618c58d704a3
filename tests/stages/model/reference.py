"""The same model in transformers: what greedy decoding and logits ought to be. Float32, one thread pool
with torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def load_reference(path: Path) -> PreTrainedModel:
    """transformers' own reading of a GGUF file or a folder, dequantised to float32."""
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
    # from_pretrained wants the package accelerate for GGUF files; what it does without it is this.
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def greedy_ids(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """What `generate` adds to one prompt of token ids; it stops at an end token, which is included."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, use_cache=True
    )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def teacher_forced_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """float32 [len(ids), vocab] of one dense forward."""
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
