"""What the registry counts is what clients saw; its names are the documented ones."""

from __future__ import annotations

import random
import socket
import time
import urllib.request

import msgpack
import pytest
import zmq
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deepinfer.clients import DeepInferError, Token
from deepinfer.daemon.config import ConfigError, DaemonConfig
from deepinfer.daemon.engine import Engine
from deepinfer.daemon.metrics import SWAP_NAMES, Metrics
from deepinfer.daemon.prometheus_port import PrometheusPort
from deepinfer.daemon.swap_events import MOVED, SwapWatch
from deepinfer.stages.admission import EndpointError
from deepinfer.stages.board import StatusBoard

PROMPT = list(range(1, 20))
NAMES_OF_THE_PRODUCT = """requests_swapped_total, requests_resumed_total, kv_cpu_offload_blocks_total,
    kv_cpu_offload_bytes_total, kv_cpu_offload_failed_total, kv_cpu_offload_rejected_total,
    kv_cpu_reload_blocks_total, cpu_offload_seconds, cpu_reload_seconds, swapped_requests,
    cpu_offload_bytes, cpu_offload_budget_bytes, cpu_offload_enabled, max_swapped_requests"""


def metrics_when(engine: Engine, holds, seconds: float = 20.0) -> dict:
    """The engine tells of its counters a few times a second."""
    give_up = time.monotonic() + seconds
    while not holds(metrics := engine.client.metrics()):
        assert time.monotonic() < give_up, metrics
        time.sleep(0.02)
    return metrics


def test_the_swap_metrics_go_by_the_fourteen_names_of_the_reference_system():
    assert set(SWAP_NAMES) == {name.strip() for name in NAMES_OF_THE_PRODUCT.split(",")}


def test_what_is_counted_is_what_clients_saw(tiny_path):
    with Engine(tiny_path, num_blocks=64) as engine:
        lengths = [1, 2, 7, 20, 33]
        results = [engine.complete(PROMPT, max_new_tokens=count, ignore_eos=True) for count in lengths]
        stream = engine.generate(PROMPT, max_new_tokens=400, ignore_eos=True)
        next(event for event in stream if isinstance(event, Token))
        stream.cancel()
        results.append(stream.result())
        with pytest.raises(DeepInferError):
            engine.complete(PROMPT, max_new_tokens=100_000)
        tokens = sum(len(result.ids) for result in results)
        metrics = metrics_when(engine, lambda m: m.get("deepinfer_generation_tokens_total", 0) >= tokens)
    assert metrics["deepinfer_request_success_total"] == {"length": 5, "cancelled": 1}
    assert metrics["deepinfer_requests_refused_total"] == {"context_exceeded": 1}
    assert metrics["deepinfer_prompt_tokens_total"] == 6 * len(PROMPT)
    assert metrics["deepinfer_time_to_first_token_seconds"]["count"] == 6
    assert metrics["deepinfer_e2e_request_latency_seconds"]["count"] == 6
    assert metrics["deepinfer_request_queue_time_seconds"]["count"] == 6
    assert metrics["deepinfer_request_time_per_output_token_seconds"]["count"] == 5
    assert metrics["deepinfer_request_generation_tokens"]["sum"] == tokens
    gaps = metrics["deepinfer_inter_token_latency_seconds"]
    assert gaps["count"] == tokens - 6
    first, whole = (
        metrics[f"deepinfer_{name}_seconds"]["sum"] for name in ("time_to_first_token", "e2e_request_latency")
    )
    assert 0 < gaps["sum"] <= whole - first
    assert metrics["deepinfer_request_prompt_tokens"]["buckets"][-1][1] == 6
    assert "deepinfer_request_errors_total" not in metrics
    assert metrics.keys() >= SWAP_NAMES


def test_a_client_that_goes_away_is_counted_once_as_disconnected(tiny_path):
    with Engine(tiny_path, num_blocks=64) as engine:
        dealer = engine.context.socket(zmq.DEALER)
        dealer.connect(engine.topology.clients)
        request = {"v": 1, "op": "generate", "prompt_ids": PROMPT, "max_new_tokens": 450, "ignore_eos": True}
        for id in range(3):
            dealer.send(msgpack.packb({**request, "id": id}))
        while msgpack.unpackb(dealer.recv())["event"] != "token":
            pass
        dealer.close(linger=0)
        metrics_when(engine, lambda m: m["deepinfer_e2e_request_latency_seconds"]["count"] == 3)
        settled = metrics_when(engine, lambda m: m.get("deepinfer_requests_finished_total") == 3)
    assert settled["deepinfer_request_success_total"] == {"disconnected": 3}
    assert settled["deepinfer_e2e_request_latency_seconds"]["count"] == 3


def test_preemptions_are_counted_as_clients_hear_of_them(tiny_path):
    settings = {"block_size": 8, "num_blocks": 14, "residency_quantum": 1}
    with Engine(tiny_path, **settings) as engine:
        streams = [engine.generate([n] * (10 + 5 * n), max_new_tokens=40, ignore_eos=True) for n in range(1, 5)]
        heard = sum(stream.result().timings["parks"] for stream in streams)
        assert heard > 0
        metrics = metrics_when(engine, lambda m: m.get("deepinfer_requests_finished_total") == 4)
    assert metrics["deepinfer_num_preemptions_total"] == heard
    assert metrics["deepinfer_events_total"]["preempted"] == heard
    assert metrics["requests_swapped_total"] + metrics["deepinfer_requests_recomputed_total"] == heard
    assert metrics["deepinfer_request_swapped_time_seconds"]["count"] > 0


def test_the_map_and_the_prometheus_text_say_the_same(tiny_path):
    with Engine(tiny_path, num_blocks=64) as engine:
        engine.complete(PROMPT, max_new_tokens=5, ignore_eos=True)
        metrics_when(engine, lambda m: m.get("deepinfer_generation_tokens_total") == 5)
        registered = Metrics(engine.board)
        told, text = registered.as_map(), generate_latest(registered.registry).decode()
    values = {}
    for family in text_string_to_metric_families(text):
        values.update({sample.name: sample.value for sample in family.samples if not sample.labels})
    plain = {name: value for name, value in told.items() if isinstance(value, int | float)}
    assert len(plain) > 40
    assert {name: values[name] for name in plain} == plain
    assert told["deepinfer_time_to_first_token_seconds"]["count"] == 0
    assert values["deepinfer_time_to_first_token_seconds_count"] == 0


def test_what_moved_adds_up_also_while_there_is_no_engine():
    random.seed(5)
    watch, total, counters = SwapWatch(), dict.fromkeys(MOVED, 0), dict.fromkeys(MOVED.values(), 0)
    for _ in range(2000):
        if random.random() < 0.01:
            assert watch.moved({}) is None
        for counter in counters:
            counters[counter] += random.choice([0, 0, 0, random.randrange(5)])
        moved = watch.moved(counters)
        assert watch.moved(counters) is None
        for field, number in (moved or {}).items():
            total[field] += number
    assert total == {field: counters[counter] for field, counter in MOVED.items()}


def test_prometheus_reads_the_registry_over_http_on_loopback():
    port = PrometheusPort(Metrics(StatusBoard({})).registry, "127.0.0.1", 0)
    try:
        text = urllib.request.urlopen(port.url, timeout=20).read().decode()
        assert "deepinfer_engine_up 0.0" in text.splitlines()
        taken = int(port.url.split(":")[2].split("/")[0])
        with pytest.raises(EndpointError, match=str(taken)):
            PrometheusPort(Metrics(StatusBoard({})).registry, "127.0.0.1", taken)
    finally:
        port.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", taken)) != 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prometheus_host": "0.0.0.0", "prometheus_port": 9400}, "prometheus_host is '0.0.0.0'; it must be one of"),
        ({"prometheus_port": 65536}, "prometheus_port is 65536"),
        ({"metrics_interval_ms": 1}, "at least 50"),
    ],
)
def test_ports_and_intervals_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        DaemonConfig(**settings).check()
