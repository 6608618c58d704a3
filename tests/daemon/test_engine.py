"""The whole daemon in one process, on a tiny model: every stage, every socket, every state."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from forced_swaps import force_swaps
from leftovers import settled

from deepinfer.clients import DeepInferError, Done, Preempted, Resumed
from deepinfer.daemon.engine import Engine

FORMATS = ["auto", "fp16", "int8", "fp8", "e5m2"]
PROMPT = "The quick brown fox jumps"
SWAP_METRICS = [
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
]
"""The names that the reference system gave them."""


def solo(engine: Engine, prompt: Any, **fields: Any) -> tuple[int, ...]:
    return engine.complete(prompt, **fields).ids


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("attention", ["numba", "reference"])
def test_every_kv_format_answers_on_both_attention_paths(tiny_path, kv_format, attention):
    with Engine(tiny_path, kv_cache_dtype=kv_format, attention=attention, num_blocks=32) as engine:
        result = engine.complete(PROMPT, max_new_tokens=20, ignore_eos=True)
        assert len(result.ids) == 20
        assert result.finish_reason == "length"
        assert result.usage["prompt_tokens"] == len(PROMPT)
        settled(engine)


def test_streams_that_fit_alone_but_not_together_all_finish_as_if_alone(tiny_path):
    prompts = [f"{PROMPT} {number}" for number in range(4)]
    fields = {"max_new_tokens": 60, "ignore_eos": True}
    settings = {"batch_invariant": True, "block_size": 8, "num_blocks": 14, "residency_quantum": 1}
    with Engine(tiny_path, **settings) as engine:
        alone = [solo(engine, prompt, **fields) for prompt in prompts]
        streams = [engine.generate(prompt, **fields) for prompt in prompts]
        together = [stream.result() for stream in streams]
        assert [result.ids for result in together] == alone
        assert sum(result.preemptions for result in together) >= 1
        settled(engine)
        time.sleep(0.3)
        status = engine.status()
        counters = status["counters"]
        assert counters["requests_swapped_total"] >= 1
        assert counters["requests_resumed_total"] == counters["requests_swapped_total"]
        assert counters["kv_cpu_reload_bytes_total"] == counters["kv_cpu_offload_bytes_total"] > 0
        assert status["blocks"]["total"] == status["blocks"]["free"] == 14
        assert status["cpu_offload"]["payload_bytes"] == 0


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_swap_at_any_token_changes_nothing(tiny_path, kv_format):
    fields = {"max_new_tokens": 24, "ignore_eos": True}
    with Engine(tiny_path, kv_cache_dtype=kv_format, batch_invariant=True, block_size=8, num_blocks=32) as engine:
        alone = solo(engine, PROMPT, **fields)
        at = {"length": -1}
        done: set[int] = set()

        def when(entry: Any) -> bool:
            if entry.length == at["length"] and entry.rid not in done:
                done.add(entry.rid)
                return True
            return False

        swapped = force_swaps(engine, when)
        for token in range(24):
            at["length"] = len(PROMPT) + token
            assert solo(engine, PROMPT, **fields) == alone, f"swapped before token {token}"
        assert len(swapped) == 24
        settled(engine)


@pytest.mark.parametrize(
    ("kv_format", "block_size", "prefix_cache"),
    [(name, size, (i + k) % 2 == 0) for i, name in enumerate(FORMATS) for k, size in enumerate((8, 16, 32))],
)
def test_a_swap_before_every_single_token_changes_nothing(tiny_path, kv_format, block_size, prefix_cache):
    """Out and back as often as it says something, over more than one boundary of the largest blocks."""
    fields = {"max_new_tokens": 42, "ignore_eos": True, "logprobs": 1}
    settings = {"block_size": block_size, "prefix_cache": prefix_cache, "num_blocks": 256 // block_size, "threads": 1}
    with Engine(tiny_path, kv_cache_dtype=kv_format, batch_invariant=True, **settings) as engine:
        prompt = PROMPT + PROMPT
        alone = engine.complete(prompt, **fields)
        last: dict[int, int] = {}

        def when(entry: Any) -> bool:
            due = entry.yielded > 0 and last.get(entry.rid) != entry.length
            last[entry.rid] = entry.length
            return due

        swapped = force_swaps(engine, when)
        answer = engine.complete(prompt, **fields)
        assert (answer.ids, answer.logprobs) == (alone.ids, alone.logprobs)
        assert len(swapped) == answer.preemptions == 41
        assert (answer.usage["cached_tokens"] > 0) == prefix_cache
        settled(engine)


def test_a_swap_that_loses_its_payload_bytes_is_seen(tiny_path):
    """The control arm of the test above: with a copy that does nothing, the ids change."""
    fields = {"max_new_tokens": 24, "ignore_eos": True}

    def no_copy(destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.zero_()

    with Engine(tiny_path, batch_invariant=True, block_size=8, num_blocks=32, copy=no_copy) as engine:
        alone = solo(engine, PROMPT, **fields)
        done: set[int] = set()
        force_swaps(engine, lambda e: e.length == len(PROMPT) + 3 and e.rid not in done and not done.add(e.rid))
        assert solo(engine, PROMPT, **fields) != alone


@pytest.mark.parametrize("chunk", [1, 3, 16, 17, 64])
@pytest.mark.parametrize("kv_format", ["auto", "int8", "fp8"])
def test_the_chunk_size_changes_nothing_in_invariant_mode(tiny_path, chunk, kv_format):
    prompt = list(range(1, 120))
    fields = {"max_new_tokens": 16, "ignore_eos": True}
    settings = {"kv_cache_dtype": kv_format, "batch_invariant": True, "num_blocks": 32}
    with Engine(tiny_path, prefill_chunk_tokens=256, **settings) as engine:
        whole = solo(engine, prompt, **fields)
    with Engine(tiny_path, prefill_chunk_tokens=chunk, **settings) as engine:
        assert solo(engine, prompt, **fields) == whole


def test_company_changes_nothing_in_invariant_mode(tiny_path):
    fields = {"max_new_tokens": 30, "ignore_eos": True, "temperature": 0.9, "seed": 5, "logprobs": 2}
    with Engine(tiny_path, batch_invariant=True, num_blocks=200) as engine:
        alone = engine.complete(PROMPT, **fields)
        others = [engine.generate(f"number {n} " * n, max_new_tokens=20 + n, ignore_eos=True) for n in range(1, 9)]
        among = engine.complete(PROMPT, **fields)
        for other in others:
            other.result()
        assert among.ids == alone.ids
        assert among.logprobs == alone.logprobs


def test_without_host_memory_requests_are_computed_again_and_nothing_changes(tiny_path):
    prompts = [f"{PROMPT} {number}" for number in range(4)]
    fields = {"max_new_tokens": 60, "ignore_eos": True}
    settings = {"batch_invariant": True, "block_size": 8, "num_blocks": 14, "residency_quantum": 1}
    with Engine(tiny_path, cpu_offload=False, prefix_cache=False, **settings) as engine:
        alone = [solo(engine, prompt, **fields) for prompt in prompts]
        together = [stream.result() for stream in [engine.generate(prompt, **fields) for prompt in prompts]]
        assert [result.ids for result in together] == alone
        settled(engine)
        time.sleep(0.3)
        counters = engine.status()["counters"]
        assert counters["requests_recomputed_total"] >= 1
        assert counters["replayed_tokens_total"] >= 1
        assert counters["requests_swapped_total"] == 0
        assert counters["prompt_tokens_total"] == 2 * sum(len(prompt) for prompt in prompts)


def test_failed_copies_lose_nothing(tiny_path):
    prompts = [f"{PROMPT} {number}" for number in range(4)]
    fields = {"max_new_tokens": 60, "ignore_eos": True}
    calls = {"count": 0}

    def flaky(destination: torch.Tensor, source: torch.Tensor) -> None:
        calls["count"] += 1
        if calls["count"] % 3 == 0:
            raise RuntimeError("injected")
        destination.copy_(source)

    settings = {"batch_invariant": True, "block_size": 8, "num_blocks": 14, "residency_quantum": 1}
    with Engine(tiny_path, copy=flaky, **settings) as engine:
        alone = [solo(engine, prompt, **fields) for prompt in prompts]
        together = [stream.result() for stream in [engine.generate(prompt, **fields) for prompt in prompts]]
        assert [result.ids for result in together] == alone
        settled(engine)
        time.sleep(0.3)
        assert engine.status()["counters"]["kv_cpu_offload_failed_total"] >= 1


def test_preempted_and_resumed_come_in_pairs_and_the_pause_is_reported(tiny_path):
    done: set[int] = set()

    def slow(destination: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(0.05)
        destination.copy_(source)

    with Engine(tiny_path, num_blocks=32, copy=slow) as engine:
        force_swaps(engine, lambda e: e.length == len(PROMPT) + 3 and e.rid not in done and not done.add(e.rid))
        events = list(engine.generate(PROMPT, max_new_tokens=12, ignore_eos=True))
        kinds = [type(event) for event in events if not event.text]
        assert kinds.count(Preempted) == kinds.count(Resumed) == 1
        assert kinds.index(Preempted) < kinds.index(Resumed)
        last = events[-1]
        assert isinstance(last, Done)
        assert last.timings["parks"] == 1
        assert last.timings["swapped_s"] > 0.05
        assert last.timings["longest_gap_s"] >= last.timings["swapped_s"]


def test_a_client_cancels_a_stream_and_others_go_on(tiny_path):
    with Engine(tiny_path, num_blocks=64) as engine:
        keep = engine.generate(PROMPT, max_new_tokens=80, ignore_eos=True)
        stream = engine.generate(PROMPT, max_new_tokens=400, ignore_eos=True)
        for event in stream:
            if event.text:
                stream.cancel()
                stream.cancel()
        result = stream.result()
        assert result.finish_reason == "cancelled"
        assert 1 <= result.usage["completion_tokens"] < 400
        assert keep.result().usage["completion_tokens"] == 80
        settled(engine)


def test_a_stop_string_ends_the_stream_and_is_not_in_the_text(tiny_path):
    with Engine(tiny_path, num_blocks=64) as engine:
        free = engine.complete(PROMPT, max_new_tokens=60, ignore_eos=True)
        text = free.text
        stop = text[10:13]
        result = engine.complete(PROMPT, max_new_tokens=60, ignore_eos=True, stop=[stop])
        assert result.finish_reason == "stop"
        assert result.stop == stop
        assert result.text == text[: text.index(stop)]
        settled(engine)


def test_deltas_together_are_the_full_decode(tiny_path):
    with Engine(tiny_path, num_blocks=64) as engine:
        for seed in range(6):
            events = list(engine.generate(PROMPT, max_new_tokens=50, temperature=1.5, seed=seed, ignore_eos=True))
            text = "".join(event.text for event in events)
            ids = [token for event in events for token in getattr(event, "ids", ())]
            assert len(ids) == 50
            assert text == engine.client.detokenize(ids)


def test_a_request_that_could_not_run_alone_is_refused_with_the_numbers(tiny_path):
    with Engine(tiny_path, num_blocks=4, block_size=8) as engine:
        with pytest.raises(DeepInferError) as refused:
            engine.complete("x" * 20, max_new_tokens=14)
        assert refused.value.code in ("context_exceeded", "kv_capacity_exceeded")
        assert "34" in refused.value.message
        assert engine.complete("x" * 20, max_new_tokens=13, ignore_eos=True).usage["completion_tokens"] == 13
        assert engine.complete("x" * 20, ignore_eos=True).usage["completion_tokens"] == 13
        settled(engine)


def test_a_deadline_ends_the_stream_with_an_error_and_gives_its_blocks_back(tiny_path):
    with Engine(tiny_path, num_blocks=64) as engine:
        with pytest.raises(DeepInferError) as ended:
            engine.complete(PROMPT, max_new_tokens=450, ignore_eos=True, deadline_ms=40)
        assert ended.value.code == "deadline_exceeded"
        settled(engine)


def test_weights_that_give_nan_end_that_request_with_a_reason(tiny_path):
    with Engine(tiny_path, num_blocks=64) as engine:
        with torch.inference_mode():
            engine.host.model.embedding._table[5] = float("nan")
        fine = engine.generate([9, 10, 11], max_new_tokens=4, ignore_eos=True, logit_bias={5: -100})
        with pytest.raises(DeepInferError) as ended:
            engine.complete([3, 4, 5, 6], max_new_tokens=4)
        assert ended.value.code == "non_finite_logits"
        assert fine.result().usage["completion_tokens"] == 4
        settled(engine)


def test_a_dead_stage_ends_every_stream_with_an_error(tiny_path):
    engine = Engine(tiny_path, num_blocks=64)

    def broken(spans: Any) -> Any:
        raise RuntimeError("injected")

    stream = engine.generate(PROMPT, max_new_tokens=400, ignore_eos=True)
    next(iter(stream))
    engine.host.decode._runner.run = broken
    with pytest.raises(DeepInferError) as ended:
        stream.result()
    assert ended.value.code == "engine_failed"
    with pytest.raises(DeepInferError) as refused:
        engine.complete(PROMPT)
    assert refused.value.code == "not_ready"
    with pytest.raises(RuntimeError, match="injected"):
        engine.close()


def test_cancel_while_prefill_has_the_blocks_ends_the_stream_at_once_and_frees_them_later(tiny_path):
    entered, gate = threading.Event(), threading.Event()
    with Engine(tiny_path, num_blocks=16) as engine:
        runner = engine.host.prefill._runner
        original = runner.run

        def held(spans: Any) -> Any:
            entered.set()
            gate.wait(20)
            return original(spans)

        runner.run = held
        stream = engine.generate(PROMPT, max_new_tokens=5)
        assert entered.wait(10)
        stream.cancel()
        assert stream.result().finish_reason == "cancelled"
        assert engine.host.residency.ledger.used > 0, "the blocks are still being written"
        gate.set()
        settled(engine)
        assert engine.complete(PROMPT, max_new_tokens=2, ignore_eos=True).finish_reason == "length"


def test_ids_that_the_tokenizer_knows_and_the_model_does_not_are_refused(tiny_path, tmp_path):
    """Tokenizers with more ids than embedding rows exist: one message must not kill the engine."""
    import shutil

    from transformers import AutoTokenizer

    folder = tmp_path / "wide"
    shutil.copytree(tiny_path, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra{number}>" for number in range(20)])
    tokenizer.save_pretrained(folder)
    with Engine(folder, num_blocks=16) as engine:
        for prompt in ("hello <extra19> there", [5, 270]):
            with pytest.raises(DeepInferError) as refused:
                engine.complete(prompt, max_new_tokens=2)
            assert refused.value.code in ("invalid_value", "out_of_range")
        assert len(engine.complete("hello", max_new_tokens=2, ignore_eos=True).ids) == 2


def test_a_chat_template_that_fails_costs_one_request(tiny_path):
    with Engine(tiny_path, num_blocks=16) as engine:
        engine.admission._intake.tokenizer._inner.chat_template = "{{ 1 // 0 }}"
        with pytest.raises(DeepInferError) as refused:
            engine.client.chat([{"role": "user", "content": "hi"}])
        assert refused.value.code in ("chat_template", "internal")
        assert len(engine.complete("hello", max_new_tokens=2, ignore_eos=True).ids) == 2


def test_a_stop_string_waits_for_min_new_tokens(tiny_path):
    with Engine(tiny_path, num_blocks=64) as engine:
        free = engine.complete(PROMPT, max_new_tokens=30, ignore_eos=True)
        result = engine.complete(PROMPT, max_new_tokens=30, min_new_tokens=20, ignore_eos=True, stop=[free.text[3:5]])
        assert result.usage["completion_tokens"] > 20
        assert result.text.startswith(free.text[:15])


def test_prompt_tokens_of_a_request_swapped_in_mid_prefill_are_counted_once(tiny_path):
    done: set[int] = set()
    with Engine(tiny_path, num_blocks=64, prefill_chunk_tokens=32) as engine:
        force_swaps(engine, lambda e: e.cached == 64 and e.rid not in done and not done.add(e.rid))
        engine.complete("x" * 200, max_new_tokens=2, ignore_eos=True)
        assert done
        time.sleep(0.3)
        counters = engine.status()["counters"]
        assert counters["prompt_tokens_total"] == 200
        assert counters["replayed_tokens_total"] == 0


def test_closing_twice_and_closing_after_admission_died_both_return(tiny_path):
    engine = Engine(tiny_path, num_blocks=16)
    engine.close()
    engine.close()
    broken = Engine(tiny_path, num_blocks=16)
    broken.admission._intake = None
    broken.admission.work = lambda: 1 / 0
    broken.admission.join(10)
    with pytest.raises(RuntimeError, match="ZeroDivision"):
        broken.close()


def test_a_constructor_that_fails_leaves_no_thread(tiny_path, monkeypatch):
    monkeypatch.setattr("deepinfer.daemon.engine.Client", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Engine(tiny_path, num_blocks=16)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("stage-")]


def test_deadlines_of_finished_requests_are_forgotten(tiny_path):
    with Engine(tiny_path, num_blocks=64) as engine:
        for _ in range(150):
            engine.complete("x", max_new_tokens=1, deadline_ms=3_600_000)
        assert len(engine.admission.table.deadlines) <= 2 * 1 + 66


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_a_prompt_that_was_seen_before_is_not_computed_again_and_nothing_changes(tiny_path, kv_format, block_size):
    prompt = list(range(1, 120))
    fields = {"max_new_tokens": 20, "ignore_eos": True}
    settings = {"kv_cache_dtype": kv_format, "block_size": block_size, "batch_invariant": True, "num_blocks": 64}
    with Engine(tiny_path, prefix_cache=False, **settings) as engine:
        expected = engine.complete(prompt, **fields)
        assert expected.usage["cached_tokens"] == engine.complete(prompt, **fields).usage["cached_tokens"] == 0
    with Engine(tiny_path, **settings) as engine:
        first, second = engine.complete(prompt, **fields), engine.complete(prompt, **fields)
        assert first.ids == second.ids == expected.ids
        assert first.usage["cached_tokens"] == 0
        assert second.usage["cached_tokens"] == 118 // block_size * block_size
        other = engine.complete(prompt, cache_salt="somebody else", **fields)
        assert other.usage["cached_tokens"] == 0
        assert other.ids == expected.ids
        settled(engine)


def test_the_next_turn_of_a_talk_finds_prompt_and_answer_of_the_one_before(tiny_path):
    with Engine(tiny_path, batch_invariant=True, num_blocks=64) as engine:
        first = engine.complete(list(range(1, 60)), max_new_tokens=40, ignore_eos=True)
        longer = [*range(1, 60), *first.ids, 7, 7, 7]
        second = engine.complete(longer, max_new_tokens=10, ignore_eos=True)
        assert second.usage["cached_tokens"] == 98 // 16 * 16
    with Engine(tiny_path, batch_invariant=True, prefix_cache=False, num_blocks=64) as engine:
        assert engine.complete(longer, max_new_tokens=10, ignore_eos=True).ids == second.ids


def test_equal_prompts_in_flight_share_blocks_and_say_the_same(tiny_path):
    prompt = list(range(1, 100))
    fields = {"max_new_tokens": 60, "ignore_eos": True}
    with Engine(tiny_path, batch_invariant=True, num_blocks=64, prefill_chunk_tokens=16) as engine:
        streams = [engine.generate(prompt, **fields) for _ in range(4)]
        for stream in streams:
            next(event for event in stream if event.text or getattr(event, "ids", ()))
        assert engine.host.residency.ledger.used < 4 * 7, "four prompts of seven blocks each"
        assert len({stream.result().ids for stream in streams}) == 1
        settled(engine)


@pytest.mark.parametrize("cpu_offload", [True, False])
def test_sharing_and_a_pool_that_is_too_small_go_together(tiny_path, cpu_offload):
    """Prompts of two families, more of them than fit: evictions, swaps or recomputation, and remapped blocks."""
    prompts = [[family] * 40 + list(range(10, 10 + number)) for number in range(1, 5) for family in (3, 4)]
    fields = {"max_new_tokens": 40, "ignore_eos": True}
    settings = {"batch_invariant": True, "block_size": 8, "residency_quantum": 1, "cpu_offload": cpu_offload}
    with Engine(tiny_path, num_blocks=64, prefix_cache=False, **settings) as engine:
        expected = [engine.complete(prompt, **fields).ids for prompt in prompts]
    with Engine(tiny_path, num_blocks=16, **settings) as engine:
        for _ in range(3):
            results = [stream.result() for stream in [engine.generate(prompt, **fields) for prompt in prompts]]
            assert [result.ids for result in results] == expected
        settled(engine)
        time.sleep(0.3)
        assert engine.status()["counters"]["prefix_cache_hits_total"] > 0


@pytest.mark.parametrize("verify", [True, False])
def test_a_payload_that_changed_on_the_host_is_noticed_and_computed_again(tiny_path, verify):
    """With the check off, the control arm, the damage reaches the answer."""
    fields = {"max_new_tokens": 24, "ignore_eos": True}
    damaged = {"count": 0}

    def damage(destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)
        damaged["count"] += 1
        if damaged["count"] == 2:
            destination[0] ^= 0x15

    settings = {"batch_invariant": True, "block_size": 8, "num_blocks": 32, "verify_payloads": verify}
    with Engine(tiny_path, copy=damage, prefix_cache=False, **settings) as engine:
        alone = solo(engine, PROMPT, **fields)
        done: set[int] = set()
        force_swaps(engine, lambda e: e.length == len(PROMPT) + 3 and e.rid not in done and not done.add(e.rid))
        assert (solo(engine, PROMPT, **fields) == alone) == verify
        settled(engine)
        time.sleep(0.3)
        assert engine.status()["counters"]["requests_recomputed_total"] == int(verify)


@pytest.mark.parametrize("victims", ["lru", "smallest", "youngest"])
def test_every_victim_policy_loses_nothing(tiny_path, victims):
    prompts = [[number] * (10 + 5 * number) for number in range(1, 5)]
    fields = {"max_new_tokens": 40, "ignore_eos": True}
    settings = {"batch_invariant": True, "block_size": 8, "num_blocks": 14, "residency_quantum": 1}
    with Engine(tiny_path, victims=victims, **settings) as engine:
        alone = [solo(engine, prompt, **fields) for prompt in prompts]
        together = [stream.result() for stream in [engine.generate(prompt, **fields) for prompt in prompts]]
        assert [result.ids for result in together] == alone
        settled(engine)
        metrics = engine.client.metrics()
        for name in SWAP_METRICS:
            assert name in metrics
