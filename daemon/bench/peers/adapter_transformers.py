"""transformers: `generate` over one batch, or its continuous batching, whose manager has a thread of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PAGE = 256
BATCH_TOKENS = 512
"""Rows of a pass of continuous batching."""
SILENCE_SECONDS = 300.0

Times = list[list[float]]
"""Of each prompt's tokens, in seconds since the start."""


def load_model(path: Path, dtype: torch.dtype) -> Any:
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype).eval()
    # from_pretrained asks for the package accelerate when it reads GGUF; these are the steps that it takes with it.
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model.eval()


def facts_of(dtype: str, threads: int, **more: Any) -> dict[str, Any]:
    return {
        "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "weights": dtype,
        "activations": dtype,
        "kv_cache": dtype,
        "threads": threads,
        **more,
    }


class Clock(StoppingCriteria):
    """Asked after every token of the batch; never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Generate:
    def __init__(self, model: Any, dtype: str, threads: int) -> None:
        self._model = model
        self.facts = facts_of(dtype, threads, starts_together=True)

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[Times, list[int]]:
        """Greedy; end tokens do not end it."""
        ids, clock = torch.tensor(prompts), Clock()
        began = time.perf_counter()
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        times = [moment - began for moment in clock.times]
        return [times] * len(prompts), out[:, ids.shape[1]].tolist()


class ContinuousBatching:
    def __init__(self, model: Any, dtype: str, threads: int, streams: int, tokens: int) -> None:
        pages = streams * -(-tokens // PAGE)
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=pages, max_batch_tokens=BATCH_TOKENS, allow_block_sharing=False
            ),
        )
        self._manager.start()
        attention = model.config._attn_implementation
        self.facts = facts_of(dtype, threads, attention=attention, batch_tokens=BATCH_TOKENS, starts_together=False)

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[Times, list[int]]:
        """Greedy; end tokens do not end it."""
        began = time.perf_counter()
        names = [
            self._manager.add_request(prompt, max_new_tokens=new_tokens, streaming=True, eos_token_id=-1)
            for prompt in prompts
        ]
        arrivals: dict[str, list[float]] = {name: [] for name in names}
        first: dict[str, int] = {}
        running = set(names)
        while running:
            result = self._manager.get_result(timeout=SILENCE_SECONDS)
            if result is None:
                raise RuntimeError(f"continuous batching was silent for {SILENCE_SECONDS:.0f} s, or has ended")
            if result.error:
                raise RuntimeError(result.error)
            name, tokens = result.request_id, result.generated_tokens
            if tokens:
                first.setdefault(name, tokens[0])
            arrivals[name] += [time.perf_counter() - began] * (len(tokens) - len(arrivals[name]))
            if result.is_finished():
                running.discard(name)
        return [arrivals[name] for name in names], [first[name] for name in names]


def load(
    model: str, threads: int, streams: int, tokens: int, dtype: str, continuous: bool
) -> Generate | ContinuousBatching:
    """`streams` of at most `tokens` each."""
    torch.set_num_threads(threads)
    loaded = load_model(Path(model), DTYPES[dtype])
    if continuous:
        return ContinuousBatching(loaded, dtype, threads, streams, tokens)
    return Generate(loaded, dtype, threads)
