"""OpenVINO GenAI's continuous batching pipeline, which reads GGUF files itself, with its own defaults for all that the
bench does not ask for: by default it rounds activations to 8 bits."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

BLOCK = 16
"""No block of OpenVINO on a CPU is smaller, so a pool of this many tokens is never too small."""
GROUP_SIZE = "DYNAMIC_QUANTIZATION_GROUP_SIZE"


class ContinuousBatching:
    def __init__(self, model: str, threads: int, streams: int, tokens: int, rounds_activations: bool) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = streams * -(-tokens // BLOCK)
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if not rounds_activations:
            properties[GROUP_SIZE] = 0
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._requests = 0
        core = openvino.Core()
        self.facts = {
            "version": f"openvino-genai {openvino_genai.__version__}",
            "weights": "as in the file, read by openvino-genai's GGUF reader",
            "activations": _activations(core, rounds_activations),
            "kv_cache": _name(core.get_property("CPU", "KV_CACHE_PRECISION")),
            "threads": threads,
            "scheduler": " ".join(scheduler.to_string().split()),
            "starts_together": False,
        }

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[float]], list[int]]:
        """Greedy; end tokens do not end it."""
        config = openvino_genai.GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=new_tokens, ignore_eos=True, do_sample=False
        )
        began = time.perf_counter()
        handles = [self._add(prompt, config) for prompt in prompts]
        arrivals: list[list[float]] = [[] for _ in prompts]
        first = [-1] * len(prompts)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - began
            for stream, handle in enumerate(handles):
                ids = _new_ids(handle)
                if ids and not arrivals[stream]:
                    first[stream] = ids[0]
                arrivals[stream] += [now] * len(ids)
        return arrivals, first

    def _add(self, prompt: list[int], config: Any) -> Any:
        self._requests += 1
        return self._pipeline.add_request(self._requests, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)


def _new_ids(handle: Any) -> list[int]:
    if not handle.can_read():
        return []
    return [token for output in handle.read().values() for token in output.generated_ids]


def _activations(core: Any, rounded: bool) -> str:
    """What it says of its defaults, which are in force unless the bench asked for others."""
    group = int(core.get_property("CPU", GROUP_SIZE)) if rounded else 0
    name = _name(core.get_property("CPU", "INFERENCE_PRECISION_HINT"))
    return f"{name}, rounded to 8 bits in groups of {group} where weights are quantised" if group else name


def _name(precision: Any) -> str:
    return precision.get_type_name() if hasattr(precision, "get_type_name") else str(precision)


def load(model: str, threads: int, streams: int, tokens: int, rounds_activations: bool) -> ContinuousBatching:
    return ContinuousBatching(model, threads, streams, tokens, rounds_activations)
