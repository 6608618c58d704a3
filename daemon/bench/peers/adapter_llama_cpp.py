"""llama.cpp through llama-cpp-python's low-level API: prompts in batches of 512 tokens, then a row of every sequence
at a time. K and V in f16, its default."""

from __future__ import annotations

import ctypes
import time

import llama_cpp

BATCH = 512


class LlamaCpp:
    def __init__(self, model: str, threads: int, streams: int, tokens: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {model}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = streams * tokens, streams
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"llama.cpp has no context of {streams} times {tokens} tokens")
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        text = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self._model, text, len(text))
        self.facts = {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "weights": f"as in the file, packed by llama.cpp ({text.value.decode()})",
            "activations": "fp32, quantised to 8 bits for the matmuls",
            "kv_cache": "f16",
            "threads": threads,
            "system": llama_cpp.llama_print_system_info().decode(),
            "starts_together": True,
        }

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[float]], list[int]]:
        """Greedy; end tokens do not end it."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        began = time.perf_counter()
        arrivals: list[list[float]] = []
        newest = []
        for sequence, prompt in enumerate(prompts):
            newest.append(self._prefill(sequence, prompt))
            arrivals.append([time.perf_counter() - began])
        first, length = list(newest), len(prompts[0])
        for step in range(new_tokens - 1):
            rows = [(token, length + step, sequence, True) for sequence, token in enumerate(newest)]
            self._decode(rows)
            newest = [self._greedy(row) for row in range(len(rows))]
            now = time.perf_counter() - began
            for times in arrivals:
                times.append(now)
        return arrivals, first

    def _prefill(self, sequence: int, prompt: list[int]) -> int:
        """The token after it."""
        last = len(prompt) - 1
        for start in range(0, len(prompt), BATCH):
            piece = prompt[start : start + BATCH]
            self._decode([(token, start + i, sequence, start + i == last) for i, token in enumerate(piece)])
        return self._greedy(-1)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """rows: token, position, sequence, whether its logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode of {len(rows)} rows returned {code}")

    def _greedy(self, row: int) -> int:
        return llama_cpp.llama_sampler_sample(self._sampler, self._context, row)


def load(model: str, threads: int, streams: int, tokens: int) -> LlamaCpp:
    return LlamaCpp(model, threads, streams, tokens)
