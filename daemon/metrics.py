"""Every metric of the daemon, in one Prometheus registry that the front process owns.

After the prefix, names are vLLM's where the meaning is the same. The swap metrics go by the names of the reference
system, without a prefix. The table of docs/metrics.md is written from this registry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UntypedMetricFamily
from prometheus_client.registry import Collector

from deepinfer.daemon.histogram import TokenHistogram
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.stats import EngineCounters
from deepinfer.stages.telemetry import RequestRecord

PREFIX = "deepinfer_"
SWAP_NAMES = frozenset(
    {
        "requests_swapped_total",
        "requests_resumed_total",
        "kv_cpu_offload_blocks_total",
        "kv_cpu_offload_bytes_total",
        "kv_cpu_offload_failed_total",
        "kv_cpu_offload_rejected_total",
        "kv_cpu_reload_blocks_total",
        "cpu_offload_seconds",
        "cpu_reload_seconds",
        "swapped_requests",
        "cpu_offload_bytes",
        "cpu_offload_budget_bytes",
        "cpu_offload_enabled",
        "max_swapped_requests",
    }
)
OTHER_NAMES = {"prompt_tokens_total": "prompt_tokens_computed_total"}
"""vLLM's prompt_tokens_total counts cached tokens too, so the engine's own counter must not go by that name."""

KERNEL_COUNTERS = {
    "kv_saturated_total": "Values that the KV format clamped.",
    "kv_nonfinite_total": "Values that were not finite when stored.",
    "cuda_graphs_captured_total": "CUDA graphs of decode steps.",
    "cuda_graph_replays_total": "Decode steps that replayed one.",
}
"""In the engine's snapshot beside its EngineCounters."""

GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0)
LATENCY_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PARK_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
TOKEN_BUCKETS = tuple(float(1 << power) for power in range(0, 18, 2))

prometheus_client.disable_created_metrics()


def exported(name: str) -> str:
    """The Prometheus name of something that the engine counts."""
    if name in SWAP_NAMES:
        return name
    return PREFIX + OTHER_NAMES.get(name, f"{name}_total" if name.endswith("_seconds") else name)


class Metrics:
    """Histograms and counters that the front keeps itself, beside what the engine's last snapshot says.

    May be called from any thread.
    """

    def __init__(self, board: StatusBoard) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_BoardCollector(board))
        self.refused = self._counter("requests_refused_total", "Requests refused before they were accepted.", ["code"])
        self.succeeded = self._counter(
            "request_success_total", "Requests that ended without an error, by reason.", ["finished_reason"]
        )
        self.failed = self._counter("request_errors_total", "Accepted requests that ended with an error.", ["code"])
        self.prompt_tokens = self._counter(
            "prompt_tokens_total", "Prompt tokens of requests that have their first token, cached ones included."
        )
        self.preemptions = self._counter("num_preemptions_total", "Times that a running request lost its blocks.")
        self.events = self._counter("events_total", "Events, by name.", ["event"])
        self.published = self._counter("telemetry_published_total", "Messages published, by topic.", ["topic"])
        self.dropped = self._counter(
            "telemetry_dropped_total", "Messages given up because the publisher was behind, by topic.", ["topic"]
        )
        latency, gap = LATENCY_BUCKETS, GAP_BUCKETS
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", latency)
        self.itl = TokenHistogram(PREFIX + "inter_token_latency_seconds", "Between two tokens of a stream.", gap)
        self.registry.register(self.itl)
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between the tokens of a request.", gap
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end of a request.", latency)
        self.queue = self._histogram("request_queue_time_seconds", "From arrival to the first blocks.", latency)
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "From the first blocks to the first token.", latency
        )
        self.decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", latency)
        self.swapped = self._histogram(
            "request_swapped_time_seconds", "Time without blocks of requests that were preempted.", latency
        )
        self.parks = self._histogram("request_parks", "Times that a request was preempted.", PARK_BUCKETS)
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens of a request.", TOKEN_BUCKETS
        )

    def finished(self, record: RequestRecord) -> None:
        if record.code is not None:
            self.failed.labels(record.code).inc()
        else:
            self.succeeded.labels(record.finish_reason).inc()
        self.e2e.observe(record.e2e_s)
        self.request_prompt_tokens.observe(record.prompt_tokens)
        self.request_generation_tokens.observe(record.completion_tokens)
        if record.tpot_s is not None:
            self.tpot.observe(record.tpot_s)
        timings = record.timings
        if timings is None:
            return
        self.queue.observe(timings.queue_s)
        if record.completion_tokens:
            self.prefill.observe(max(0.0, timings.ttft_s - timings.queue_s))
            self.decode.observe(timings.decode_s)
        self.parks.observe(timings.parks)
        if timings.parks:
            self.swapped.observe(timings.swapped_s)

    def as_map(self) -> dict[str, Any]:
        """Name to value: a number; with a label, a map of label to number; a histogram, a map of `count`, `sum` and
        `buckets`, a list of [upper bound, how many were at most that], without the infinite one."""
        return {name: value for family in self.registry.collect() for name, value in _family(family)}

    def _counter(self, name: str, help: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(PREFIX + name, help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, help, buckets=buckets, registry=self.registry)


def _family(family: Metric) -> Iterable[tuple[str, Any]]:
    if family.type == "histogram":
        values: dict[str, Any] = {"buckets": [], "count": 0, "sum": 0.0}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                if sample.labels["le"] != "+Inf":
                    values["buckets"].append([float(sample.labels["le"]), int(sample.value)])
            else:
                values[sample.name.rpartition("_")[2]] = _plain(sample.value)
        return [(family.name, values)]
    labelled: dict[str, dict[str, Any]] = {}
    plain = []
    for sample in family.samples:
        if sample.labels:
            (label,) = sample.labels.values()
            labelled.setdefault(sample.name, {})[label] = _plain(sample.value)
        else:
            plain.append((sample.name, _plain(sample.value)))
    return [*plain, *labelled.items()]


def _plain(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


class _BoardCollector(Collector):
    """What others wrote on the board, read when somebody asks. Nothing of the engine before its first snapshot."""

    def __init__(self, board: StatusBoard) -> None:
        self._board = board

    def collect(self) -> Iterable[Metric]:
        board = self._board
        yield _gauge("engine_up", "1 while the engine is ready or drains, and moves.", board.engine_up())
        yield CounterMetricFamily(PREFIX + "engine_deaths_total", "Engines that died.", value=board.engine_deaths)
        still = GaugeMetricFamily(
            PREFIX + "stage_still_seconds", "For how long a stage has had work and not moved.", labels=["stage"]
        )
        for stage, health in board.health.items():
            still.add_metric([stage], health["still_s"])
        yield still
        yield _gauge("live_requests", "Accepted requests that have not left the front.", board.front.get("live", 0))
        yield _gauge("blocked_requests", "Of these, those whose client does not read.", board.front.get("blocked", 0))
        if board.summary:
            yield from _of_summary(board.summary)
        stats = board.stats
        yield from _counters(stats)
        yield from _bytes_read(stats, board.summary)
        if "states" in stats:  # Not between the death of an engine and the first snapshot of the next one.
            yield from _of_snapshot(stats)


def _of_summary(summary: Mapping[str, Any]) -> Iterable[Metric]:
    yield _gauge("cpu_offload_enabled", "1 when requests can be swapped.", summary["cpu_offload_enabled"])
    yield _gauge("cpu_offload_budget_bytes", "Host memory for swapped requests.", summary["cpu_offload_budget_bytes"])
    yield _gauge("kv_block_bytes", "Bytes of one KV block.", summary["block_bytes"])


def _counters(stats: Mapping[str, Any]) -> Iterable[Metric]:
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(EngineCounters)} | KERNEL_COUNTERS
    for counter in helps.keys() & stats.keys():
        name, help, value = exported(counter), helps[counter], stats[counter]
        if name.endswith("_total"):
            yield CounterMetricFamily(name, help, value=value)
        elif name.endswith("_seconds"):
            # cpu_offload_seconds and cpu_reload_seconds: a counter's name would have to end in _total.
            yield UntypedMetricFamily(name, help, value=value)
        else:
            yield GaugeMetricFamily(name, help, value=value)


def _of_snapshot(stats: Mapping[str, Any]) -> Iterable[Metric]:
    states, total = stats["states"], stats["num_blocks"]
    by_state = GaugeMetricFamily(PREFIX + "requests", "Requests of the engine, by state.", labels=["state"])
    for state, number in states.items():
        by_state.add_metric([state], number)
    yield by_state
    running = states["prefill"] + states["decode"]
    yield _gauge("num_requests_running", "Requests that hold blocks and are computed.", running)
    yield _gauge("num_requests_waiting", "Requests that wait for blocks.", states["waiting"])
    used = 1 - stats["free_blocks"] / total if total else 0
    yield _gauge("kv_cache_usage_perc", "Part of the KV blocks that requests hold, 0 to 1.", used)
    yield _gauge("kv_blocks", "KV blocks of the pool.", total)
    yield _gauge("kv_blocks_free", "KV blocks that no request holds.", stats["free_blocks"])
    yield _gauge("kv_blocks_cached", "Of these, those that keep prompt beginnings for reuse.", stats["cached_blocks"])
    yield _gauge("swapped_requests", "Requests in host memory.", stats["swapped_requests"])
    yield _gauge("cpu_offload_bytes", "Bytes of swapped requests in host memory.", stats["cpu_offload_bytes"])


def _bytes_read(stats: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterable[Metric]:
    """Not told of models with sliding windows, whose layers read less than is stored."""
    if "decode_steps_total" not in stats or not summary or summary["sliding_windows"]:
        return
    weights = stats["decode_steps_total"] * summary["step_weight_bytes"]
    tokens = stats["decode_context_tokens_total"] * summary["block_bytes"] // summary["block_size"]
    help = "Bytes that decode steps had to read: {} every {} once a step."
    yield CounterMetricFamily(PREFIX + "decode_weight_bytes_total", help.format("weights,", "weight"), value=weights)
    yield CounterMetricFamily(
        PREFIX + "decode_kv_bytes_total", help.format("stored keys and values,", "request's"), value=tokens
    )


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(exported(name), help, value=value)
