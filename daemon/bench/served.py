"""What a client sees of a served load, under the names that `vllm bench serve` gives it in its result files."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deepinfer.daemon.bench.load import Seen

PERCENTILES = (95, 99)
BACKEND = "deepinfer"


class Pass(NamedTuple):
    """One run of a load: its requests in the order in which they were sent, and the seconds from the first request to
    the last event."""

    seen: Sequence[Seen]
    seconds: float


class Asked(NamedTuple):
    """What the load was asked to be."""

    model: str
    num_prompts: int
    concurrency: int
    request_rate: float
    """Of Poisson arrivals a second; infinity: all at once."""


def serve_result(asked: Asked, passes: Sequence[Pass], detailed: bool = False) -> dict[str, Any]:
    """Passes one after the other count as one long run; latencies are over all their requests. `detailed` adds the
    lists that `--save-detailed` adds there. Seconds where the name does not say milliseconds."""
    finished = [seen for run in passes for seen in run.seen if seen.done is not None]
    total = sum(len(run.seen) for run in passes)
    duration = sum(run.seconds for run in passes)
    tokens_in = sum(input_tokens(seen) for seen in finished)
    tokens_out = sum(len(seen.tokens) for seen in finished)
    peaks = [_peaks(run) for run in passes]
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": BACKEND,
        "backend": BACKEND,
        "label": None,
        "model_id": asked.model,
        "tokenizer_id": asked.model,
        "num_prompts": asked.num_prompts,
        "request_rate": "inf" if math.isinf(asked.request_rate) else asked.request_rate,
        "burstiness": 1.0,
        "max_concurrency": asked.concurrency,
        "duration": duration,
        "completed": len(finished),
        "failed": total - len(finished),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(finished) / duration,
        "request_goodput": None,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        "max_output_tokens_per_s": max(tokens for tokens, _ in peaks),
        "max_concurrent_requests": max(requests for _, requests in peaks),
        "rtfx": 0.0,
    }
    for name, values in latencies(finished).items():
        result |= _figures(name, values)
    if detailed:
        result |= _details([seen for run in passes for seen in run.seen])
    return result


def latencies(finished: Iterable[Seen]) -> dict[str, list[float]]:
    """Seconds: `ttft` and `e2el` of every request, `tpot` of those with more than one token (the time after the first
    one, by token), `itl` of every pause between events with tokens."""
    found: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    for seen in finished:
        found["e2el"].append(seen.ended - seen.sent)
        if not seen.tokens:
            continue
        found["ttft"].append(seen.tokens[0] - seen.sent)
        if len(seen.tokens) > 1:
            found["tpot"].append((seen.ended - seen.tokens[0]) / (len(seen.tokens) - 1))
        found["itl"] += [end - begin for begin, end in seen.gaps]
    return found


def _figures(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds; 0 where nothing was measured, as there."""
    values = 1000 * np.array(seconds if seconds else [0.0])
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        **{f"p{p}_{name}_ms": float(np.percentile(values, p)) for p in PERCENTILES},
    }


def input_tokens(seen: Seen) -> int:
    return int(_usage(seen).get("prompt_tokens", 0))


def cached_tokens(seen: Seen) -> int:
    return int(_usage(seen).get("cached_tokens", 0))


def _usage(seen: Seen) -> Mapping[str, int]:
    return seen.done["usage"] if seen.done is not None else {}


def _peaks(run: Pass) -> tuple[float, int]:
    """Most tokens in one second, and most requests that were live in one, counted in whole seconds from the first
    request on."""
    finished = [seen for seen in run.seen if seen.done is not None]
    if not finished:
        return 0.0, 0
    first = min(seen.sent for seen in finished)
    seconds = math.ceil(max(seen.ended for seen in finished) - first) + 1
    tokens, requests = np.zeros(seconds), np.zeros(seconds, dtype=int)
    for seen in finished:
        for moment in seen.tokens:
            tokens[int(moment - first)] += 1
        requests[int(seen.sent - first) : int(seen.ended - first) + 1] += 1
    return float(tokens.max()), int(requests.max())


def _details(seen: Sequence[Seen]) -> dict[str, list[Any]]:
    """One entry for each request, failed ones included."""
    return {
        "input_lens": [input_tokens(one) for one in seen],
        "output_lens": [len(one.tokens) if one.done is not None else 0 for one in seen],
        "ttfts": [one.tokens[0] - one.sent if one.tokens else 0.0 for one in seen],
        "itls": [[end - begin for begin, end in one.gaps] for one in seen],
        "start_times": [one.sent for one in seen],
        "generated_texts": ["".join(one.texts) for one in seen],
        "errors": [one.error or "" for one in seen],
    }
