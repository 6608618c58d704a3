"""`deepinfer-daemon bench serving`: what this machine gets out of the daemon, beside a peer, in one run.

The daemon is a real one, driven over its socket. Whatever is compared is measured in turns, round after round, and a
ratio is the median of the rounds' ratios: a slow minute of the machine then hits both sides.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click

from deepinfer.clients import Client
from deepinfer.daemon.bench.conditions import conditions, engine_facts
from deepinfer.daemon.bench.load import prompt_vocabulary, random_prompt, started_daemon
from deepinfer.daemon.bench.peers.config import Arm
from deepinfer.daemon.bench.peers.measure import Ours, rate_of
from deepinfer.daemon.bench.peers.process import PeerFailed, PeerProcess
from deepinfer.daemon.bench.peers.roster import TRANSFORMERS_FP32, start_peer
from deepinfer.daemon.bench.results import write_json
from deepinfer.daemon.bench.rounds import Spread, noise, print_noise, ratio_line, ratio_of
from deepinfer.stages.model import resolve_model

PROMPT_TOKENS = 64
NEW_TOKENS = 64
CONCURRENCY = (1, 4, 8, 16)
LONG_CONTEXT = 1000
PREFILL_TOKENS = 512
FORMATS = ("fp16", "int8", "fp8_e4m3", "fp8_e5m2")
PEER_SECONDS = 600.0
PEER = "transformers fp32 generate, c=1"

Samples = dict[str, list[float]]


def run_bench(model: str, threads: int, rounds: int, with_peer: bool, output: Path | None) -> None:
    with ExitStack() as stack:
        report = _measure(stack, model, threads, rounds, with_peer)
    _print(report)
    write_json(report, output)


def _measure(stack: ExitStack, model: str, threads: int, rounds: int, with_peer: bool) -> dict[str, Any]:
    options = ["--model", model, "--threads", str(threads), "--max-cache", "24576", "--no-prefix-cache"]
    main = stack.enter_context(started_daemon(*options))
    invariant = stack.enter_context(started_daemon(*options, "--batch-invariant"))
    formats = {name: stack.enter_context(started_daemon(*options, "--kv-cache-dtype", name)) for name in FORMATS}
    arms: dict[str, Callable[[], float]] = {
        **{f"decode c={count}": partial(_decode_rate, main, count, PROMPT_TOKENS) for count in CONCURRENCY},
        "decode c=1, batch invariant": partial(_decode_rate, invariant, 1, PROMPT_TOKENS),
        "decode c=8, batch invariant": partial(_decode_rate, invariant, 8, PROMPT_TOKENS),
        f"prefill of {PREFILL_TOKENS}": partial(_prefill_rate, main),
        **{_format_arm(name): partial(_decode_rate, client, 1, LONG_CONTEXT) for name, client in formats.items()},
    }
    if with_peer:
        prompt = random_prompt(PROMPT_TOKENS, 0, prompt_vocabulary(main))
        arms[PEER] = partial(_peer_rate, stack.enter_context(_transformers(model, threads, prompt)), prompt)
    samples: Samples = {name: [] for name in arms}
    for number in range(rounds):
        click.echo(f"round {number + 1} of {rounds}", err=True)
        for name, measure in arms.items():
            samples[name].append(measure())
    status = main.status()
    ratios = _ratios(samples)
    return {
        **conditions(),
        "model": model,
        "threads": threads,
        "rounds": rounds,
        "ready_seconds": status["ready_seconds"],
        "engine": engine_facts(status),
        "tokens_per_s": {name: round(statistics.median(values), 2) for name, values in samples.items()},
        "ratios": {name: {key: round(v, 3) for key, v in ratio._asdict().items()} for name, ratio in ratios.items()},
        "too_noisy": noise(ratios, rounds),
        "samples_tokens_per_s": {name: [round(v, 2) for v in values] for name, values in samples.items()},
    }


def _format_arm(name: str) -> str:
    return f"decode c=1 at {LONG_CONTEXT} tokens, KV {name}"


def _ratios(samples: Samples) -> dict[str, Spread]:
    """Median, least and greatest of the rounds' ratios."""
    pairs = {
        "c=8 to c=1": ("decode c=8", "decode c=1"),
        "batch invariant to default, c=1": ("decode c=1, batch invariant", "decode c=1"),
        "batch invariant to default, c=8": ("decode c=8, batch invariant", "decode c=8"),
        **{f"KV {name} to fp16": (_format_arm(name), _format_arm("fp16")) for name in FORMATS[1:]},
    }
    if PEER in samples:
        pairs["c=1 to transformers fp32"] = ("decode c=1", PEER)
    return {name: ratio_of(samples, *pair) for name, pair in pairs.items()}


# --- one arm ------------------------------------------------------------------------------------------------------


def _decode_rate(client: Client, concurrency: int, prompt_tokens: int) -> float:
    """Tokens per second over all streams while every one of them decodes."""
    vocab_size = prompt_vocabulary(client)
    prompts = [random_prompt(prompt_tokens, number, vocab_size) for number in range(concurrency)]
    # The later a stream is admitted, the more tokens it needs to be still there when the others are measured.
    run = Ours(client).run(prompts, NEW_TOKENS + 2 * concurrency)
    return rate_of(Arm("decode", concurrency, prompt_tokens), run)


def _prefill_rate(client: Client) -> float:
    prompt = random_prompt(PREFILL_TOKENS, 7, prompt_vocabulary(client))
    began = time.perf_counter()
    client.complete(prompt, max_new_tokens=1)
    return PREFILL_TOKENS / (time.perf_counter() - began)


def _peer_rate(peer: PeerProcess, prompt: list[int]) -> float:
    run = peer.run([prompt], NEW_TOKENS)
    return rate_of(Arm("decode", 1, PROMPT_TOKENS), run)


# --- who is measured ----------------------------------------------------------------------------------------------


def _transformers(model: str, threads: int, prompt: list[int]) -> PeerProcess:
    options = {"model": str(resolve_model(model)), "threads": threads, "streams": 1, "tokens": LONG_CONTEXT}
    try:
        peer = start_peer(TRANSFORMERS_FP32, sys.executable, options, PEER_SECONDS)
    except PeerFailed as error:
        raise click.ClickException(
            f"transformers cannot load this model: {error}; leave it out with --no-peer"
        ) from None
    peer.run([prompt], 4)
    return peer


# --- the report ---------------------------------------------------------------------------------------------------


def _print(report: dict[str, Any]) -> None:
    machine = report["machine"]
    click.echo(f"{machine['cpu']}, {report['threads']} threads; {report['model']}; {report['rounds']} rounds, medians")
    click.echo(f"ready after {report['ready_seconds']} s")
    step_bytes = report["engine"]["step_weight_bytes"]
    for name, rate in report["tokens_per_s"].items():
        line = f"{name:42} {rate:10.1f} tokens/s"
        if name == "decode c=1":
            line += f"   {rate * step_bytes / 1e9:6.1f} GB/s of weights"
        click.echo(line)
    for name, ratio in report["ratios"].items():
        click.echo(ratio_line(name, Spread(**ratio)))
    print_noise(report)
