"""The memory plan: its arithmetic, what it refuses, and that passes take no more than it says."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tiny import save_tiny_family

from deepinfer.daemon.cli import main
from deepinfer.daemon.config import ConfigError, EngineConfig
from deepinfer.daemon.planner import Demand, demand_of, largest_context, plan_memory, without_pool
from deepinfer.daemon.target import Target
from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.attention import AttentionBatch
from deepinfer.kernels.cuda.decode_plan import num_partitions, workspace_bytes
from deepinfer.kernels.ops import CpuOps
from deepinfer.stages.memory.layer_groups import group_layers
from deepinfer.stages.model import Executor, ForwardBatch, load_model, open_checkpoint
from deepinfer.stages.model.config import ModelConfig, RopeConfig
from deepinfer.stages.model.scratch import activation_bytes

GIB, MIB = 1 << 30, 1 << 20
W4_3B_BYTES = 2_050_000_000
QWEN_3B = ModelConfig(
    family="qwen2",
    num_layers=36,
    hidden_size=2048,
    num_q_heads=16,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=11008,
    vocab_size=151936,
    max_context=32768,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6),
    windows=(0,) * 36,
    tie_word_embeddings=True,
    eos_token_ids=(151645,),
    qkv_bias=True,
)
BLOCK_BYTES = {"fp16": 589_824, "int8": 299_520, "fp8_e4m3": 294_912, "fp8_e5m2": 294_912}


def demand(name: str, weights: int = W4_3B_BYTES, model: ModelConfig = QWEN_3B, block_size: int = 16) -> Demand:
    kv_format = resolve_kv_format(name)
    layout = kv_format.layout(model.num_layers, model.num_kv_heads, model.head_dim, block_size)
    return Demand(model, "bf16", weights, layout, kv_format, group_layers(model.windows))


def card(memory: int) -> Target:
    return Target("cuda", True, True, memory, memory, 16 * GIB)


@pytest.mark.parametrize("name", BLOCK_BYTES)
def test_on_a_card_of_4_gib_the_pool_is_what_weights_passes_and_margin_leave(name):
    plan = plan_memory(EngineConfig(), demand(name), card(4 * GIB))
    assert plan.block_bytes == BLOCK_BYTES[name]
    assert plan.margin == 256 * MIB
    left = 4 * GIB - W4_3B_BYTES - plan.activations - plan.scratch - plan.graphs - 256 * MIB
    assert plan.num_blocks == left // BLOCK_BYTES[name]
    assert plan.context == 32768
    assert plan.reason == "all that is left"


def test_eight_bit_formats_hold_twice_the_tokens_of_fp16_less_their_scales():
    tokens = {name: plan_memory(EngineConfig(), demand(name), card(4 * GIB)).token_capacity for name in BLOCK_BYTES}
    assert tokens["fp8_e4m3"] == tokens["fp8_e5m2"]
    assert tokens["fp8_e4m3"] / tokens["fp16"] == pytest.approx(2, abs=0.001)
    assert tokens["int8"] / tokens["fp16"] == pytest.approx(589_824 / 299_520, abs=0.001)


def test_the_margin_is_six_percent_of_a_large_card():
    assert plan_memory(EngineConfig(), demand("fp16"), card(8 * GIB)).margin == int(0.06 * 8 * GIB)
    host = Target("cpu", False, False, 8 * GIB, 8 * GIB, 8 * GIB)
    assert plan_memory(EngineConfig(), demand("fp16"), host).margin == 0


def test_a_memory_fraction_bounds_what_the_engine_takes_in_all():
    plan = plan_memory(EngineConfig(gpu_memory_fraction=0.7), demand("fp16"), card(4 * GIB))
    taken = plan.needed - plan.margin
    assert 0.7 * 4 * GIB - plan.block_bytes < taken <= 0.7 * 4 * GIB
    greedy = plan_memory(EngineConfig(gpu_memory_fraction=1.0), demand("fp16"), card(4 * GIB))
    assert greedy == plan_memory(EngineConfig(), demand("fp16"), card(4 * GIB))


def test_what_others_hold_of_a_card_is_not_planned_with():
    busy = card(8 * GIB)._replace(free=4 * GIB)
    plan = plan_memory(EngineConfig(), demand("fp16"), busy)
    assert plan.margin == int(0.06 * 8 * GIB)
    assert 4 * GIB - plan.block_bytes < plan.needed <= 4 * GIB


@pytest.mark.parametrize(
    ("settings", "blocks", "context"),
    [
        ({"num_blocks": 100}, 100, 1601),
        ({"max_cache": 1000}, 63, 1009),
        ({"max_cache": 1000, "max_context": 500}, 63, 500),
    ],
)
def test_a_pool_of_a_given_size_is_that_size(settings, blocks, context):
    plan = plan_memory(EngineConfig(**settings), demand("fp16"), card(4 * GIB))
    assert (plan.num_blocks, plan.context) == (blocks, context)


def test_a_refusal_says_what_is_needed_what_is_there_and_what_would_fit():
    settings = EngineConfig(max_context=32768)
    with pytest.raises(ConfigError) as refused:
        plan_memory(settings, demand("fp16"), card(3 * GIB))
    words = str(refused.value)
    fits = largest_context(settings, demand("fp16"), card(3 * GIB))
    assert f"largest context that would fit is {fits} tokens" in words
    for part in ("weights 1,955 MiB", "a margin of 256 MiB", "are needed", "3,072 MiB are available on cuda"):
        assert part in words
    plan = plan_memory(EngineConfig(max_context=fits), demand("fp16"), card(3 * GIB))
    assert plan.context == fits
    with pytest.raises(ConfigError, match="not even the smallest context"):
        plan_memory(settings, demand("fp16"), card(2 * GIB))
    with pytest.raises(ConfigError, match="of host memory are free"):
        plan_memory(EngineConfig(), demand("fp16"), card(4 * GIB)._replace(host_free=GIB))


def test_without_a_wish_the_context_is_the_largest_that_fits():
    plan = plan_memory(EngineConfig(), demand("fp16"), card(3 * GIB))
    assert 16 < plan.context < 32768
    assert plan.context == largest_context(EngineConfig(), demand("fp16"), card(3 * GIB))


def test_random_plans_fit_or_are_refused_and_the_largest_context_is_the_largest():
    rng = random.Random(11)
    refusals = 0
    for _ in range(150):
        gpu = rng.random() < 0.6
        memory = rng.randrange(1 * GIB, 9 * GIB)
        target = Target("x", gpu, gpu, memory, memory, 8 * GIB if gpu else memory)
        wish = EngineConfig(
            max_context=rng.choice([None, rng.randrange(2, 32769)]),
            num_blocks=rng.choice([None, None, rng.randrange(1, 6000)]),
            max_cpu_offload_mb=rng.choice([0, 2048]),
            max_running=rng.choice([1, 8, 64]),
            gpu_memory_fraction=rng.choice([None, rng.uniform(0.3, 1.0)]),
        )
        need = demand(rng.choice(list(BLOCK_BYTES)), rng.randrange(1 << 28, 5 << 29))
        try:
            plan = plan_memory(wish, need, target)
        except ConfigError:
            refusals += 1
        else:
            assert plan.needed <= memory
            assert plan.num_blocks >= 1
            assert plan.context - 1 <= plan.token_capacity
            if wish.num_blocks is None and wish.max_context is not None:
                assert plan.context == wish.max_context
        free = dataclasses.replace(wish, num_blocks=None, max_context=None)
        fits = largest_context(free, need, target)
        if fits >= 2:
            assert plan_memory(dataclasses.replace(free, max_context=fits), need, target).context == fits
        if fits < 32768:
            with pytest.raises(ConfigError):
                plan_memory(dataclasses.replace(free, max_context=min(32768, fits + 17)), need, target)
    assert 15 < refusals < 135


def windowed() -> Demand:
    """The same model, if five of six layers saw 1,024 tokens."""
    plain = demand("fp16")
    model = dataclasses.replace(plain.model, windows=((1024,) * 5 + (0,)) * 6)
    groups = group_layers(model.windows)
    sizes = model.num_layers, model.num_kv_heads, model.head_dim, plain.layout.block_size
    return plain._replace(model=model, groups=groups, layout=plain.kv_format.layout(*sizes, groups.groups))


def test_where_layers_slide_a_context_takes_what_they_see_and_not_all_of_it():
    """Of 2,048 blocks, five of six layers hold 1,024 tokens, what a kernel reads before them, a chunk and a token."""
    settings = EngineConfig(max_context=32768)
    target = Target("cpu", False, False, 64 * GIB, 64 * GIB, 64 * GIB)
    full, sliding = plan_memory(settings, demand("fp16"), target), plan_memory(settings, windowed(), target)
    assert (full.num_blocks, full.reason) == (4 * 2048, "4 contexts of 32768 tokens")
    held = -(-(1023 + 31 + 2 * 256 + 1) // 16)
    assert sliding.num_blocks == 4 * -(-(2048 + 5 * held) // 6)
    assert (sliding.context, sliding.longest_stored) == (32768, 32768)
    small = card(int(2.6 * GIB))
    settings = dataclasses.replace(settings, max_context=None)
    assert largest_context(settings, windowed(), small) > 3 * largest_context(settings, demand("fp16"), small)


@pytest.mark.parametrize("blocks", [1, 40, 130, 400, 2000])
def test_the_context_of_a_given_pool_is_the_longest_that_runs_alone(blocks):
    target = Target("cpu", False, False, 64 * GIB, 64 * GIB, 64 * GIB)
    plan = plan_memory(EngineConfig(num_blocks=blocks), windowed(), target)
    needs = windowed().groups.rows_alone
    assert needs(plan.context - 1, 16, 512) <= 6 * blocks
    assert plan.context == 32768 or needs(plan.context, 16, 512) > 6 * blocks
    assert (plan.context > 16 * blocks + 1) == (blocks >= 130)


def test_a_given_pool_whose_windows_slide_over_more_than_there_is_memory_for_serves_what_there_is():
    """RoPE tables and scratch grow with the context."""
    all_slide = windowed()._replace(groups=group_layers((1024,) * 36), layout=demand("fp16").layout)
    ample = Target("cpu", False, False, 64 * GIB, 64 * GIB, 64 * GIB)
    settings = EngineConfig(num_blocks=120, max_cpu_offload_mb=0)
    most = plan_memory(settings, all_slide, ample)
    assert most.context == 32768
    tight = ample._replace(free=most.needed - 1)
    plan = plan_memory(settings, all_slide, tight)
    assert 1920 < plan.context < 32768
    assert plan.needed <= tight.free
    with pytest.raises(ConfigError, match="it does not fit"):
        plan_memory(dataclasses.replace(settings, max_context=32768), all_slide, tight)


def test_the_workspace_covers_every_context_up_to_the_one_it_is_for():
    for visible in (1, 100, 4096, 4097, 8000, 16384, 16385, 20000, 131072):
        most = int(num_partitions(np.arange(1, visible + 1)).max())
        floats = 3 * 16 * 128 + 3 * 16 * most * 128 + 3 * 16 * most * 2
        assert workspace_bytes(3, 16, 128, visible) == 4 * floats


@pytest.mark.parametrize(("rows", "sampled"), [(256, 1), (64, 64), (200, 200)])
def test_a_pass_holds_no_more_than_the_plan_reserves(tiny_path, rows, sampled):
    """Torch counts what it allocates. The kept buffers are counted for every row count, of which this runs one."""
    checkpoint = open_checkpoint(tiny_path)
    model = load_model(checkpoint, dtype="fp32")
    layout = resolve_kv_format("fp32").layout(2, 2, 16, 16)
    pool = torch.zeros(rows // 16 + 2, layout.block_bytes, dtype=torch.uint8)
    tables = model.rope_tables(rows + 1)
    attention = CpuOps().attention(
        "reference", model.attention_spec(), layout, resolve_kv_format("fp32"), pool, *tables, False
    )
    batch = ForwardBatch(
        token_ids=torch.ones(rows, dtype=torch.int32),
        attention=AttentionBatch(
            positions=torch.arange(rows, dtype=torch.int32),
            row_seq=torch.zeros(rows, dtype=torch.int32),
            block_tables=torch.arange(rows // 16 + 2, dtype=torch.int32)[None],
            seq_starts=torch.tensor([0, rows], dtype=torch.int32),
        ),
        logits_rows=torch.arange(sampled),
    )
    attention.forward = lambda layer, qkv, batch, out: out.zero_()  # Its scratch is counted elsewhere.
    executor = Executor(model, attention)
    with torch.profiler.profile(profile_memory=True) as profile:
        executor.forward(batch)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    reserved = activation_bytes(model.config, 4, rows, sampled)
    assert 0.3 * reserved < held.max() + kept_beside(model.config, sampled) <= reserved


def kept_beside(config: ModelConfig, sampled: int) -> int:
    kept = min(64, sampled)
    return 4 * (config.hidden_size + config.q_size + config.intermediate_size) * kept * (kept + 1) // 2


@pytest.fixture(scope="module")
def three_b(tmp_path_factory):
    """Qwen2.5-3B in 16 bits as far as headers tell: the file has its size, and holes instead of weights."""
    from deepinfer.stages.model.config import parameter_shapes

    folder = tmp_path_factory.mktemp("three-b")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
                "num_hidden_layers": 36,
                "hidden_size": 2048,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "intermediate_size": 11008,
                "vocab_size": 151936,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e6,
                "hidden_act": "silu",
                "tie_word_embeddings": True,
                "eos_token_id": 151645,
            }
        )
    )
    header, end = {}, 0
    for name, shape in parameter_shapes(QWEN_3B).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    return folder


def run_plan(*arguments: str):
    return CliRunner().invoke(main, ["plan", *arguments], env={"DEEPINFER_CONFIG_DIR": "/nowhere"})


def test_plan_needs_no_gpu_and_reads_no_weights(three_b):
    """The file has no weights that could be read in this time."""
    arguments = ["--model", str(three_b), "--device", "cuda"]
    refused = run_plan(*arguments, "--memory", "4GiB")
    assert refused.exit_code == 78
    assert "weights 5,8" in refused.output
    shown = run_plan(*arguments, "--memory", "8GiB", "--json")
    assert shown.exit_code == 0, shown.output
    plan = json.loads(shown.output)
    assert plan["compute_dtype"] == "bf16"
    assert plan["weights"] == pytest.approx(2 * 3_085_938_688, rel=0.001)
    sizes = {entry["kv_format"]: entry["block_bytes"] for entry in plan["capacities"]}
    assert {name: sizes[name] for name in BLOCK_BYTES} == BLOCK_BYTES
    assert plan["needed"] <= 8 * GIB
    table = run_plan(*arguments, "--memory", "8GiB").output
    assert "294,912" in table
    assert "of host memory" in table


def test_plan_says_what_long_requests_hold_while_they_decode_where_some_layers_slide(tmp_path):
    """Of six layers five see 24 tokens: a row each."""
    path = save_tiny_family(tmp_path, "gemma3_text", num_hidden_layers=6, sliding_window=24)
    plan = json.loads(run_plan("--model", str(path), "--json").output)
    assert plan["layer_groups"] == {"rows_per_block": 6, "sliding_rows": 5, "window": 24, "padding_layers": 0}
    for entry in plan["capacities"]:
        rows = 6 * entry["blocks"]
        assert entry["context"] == 512
        held = 32 + 5 * (32 - (511 - 23) // 32 * 2)
        assert entry["decoding_tokens"] == rows * 512 // held
        assert entry["decoding_tokens"] > 3 * entry["tokens"]
    table = run_plan("--model", str(path)).output
    assert "tokens while decoding" in table
    assert "they keep 24 tokens of a context that decodes, 5 of the 6 rows of a block" in table


def test_plan_does_not_speak_of_windows_where_there_are_none(tiny_path):
    table = run_plan("--model", str(tiny_path)).output
    assert "decod" not in table
    (plan, *_) = json.loads(run_plan("--model", str(tiny_path), "--json").output)["capacities"]
    assert plan["decoding_tokens"] == pytest.approx(plan["tokens"], rel=0.01)


def test_plan_refuses_what_has_no_kernel_on_that_device(three_b):
    arguments = ["--model", str(three_b), "--device", "cuda", "--memory", "8GiB"]
    for wish, words in (
        (["--block-size", "128"], "no CUDA kernel for block size 128"),
        (["--kv-cache-dtype", "fp32"], "no CUDA kernel stores K as fp32"),
    ):
        refused = run_plan(*arguments, *wish)
        assert refused.exit_code == 78
        assert words in refused.output


@pytest.mark.parametrize("size", ["4x", "-1", "0", "GiB", ""])
def test_a_memory_size_that_is_none_is_refused(size):
    assert run_plan("--memory", size).exit_code == 2


def test_a_given_memory_size_is_understood_in_the_usual_units(three_b):
    for size, expected in {"8GiB": 8 * GIB, "8192 MiB": 8 * GIB, "8.5gb": 8_500_000_000, str(8 * GIB): 8 * GIB}.items():
        shown = run_plan("--model", str(three_b), "--device", "cuda", "--memory", size, "--json")
        assert json.loads(shown.output)["free"] == expected


def test_the_plan_of_a_start_is_the_plan_of_the_command(tiny_path):
    from deepinfer.daemon.engine import Engine

    with Engine(tiny_path, max_cpu_offload_mb=16) as engine:
        running = engine.status()["engine"]
    shown = json.loads(run_plan("--model", str(tiny_path), "--max-cpu-offload-mb", "16", "--json").output)
    for name in ("weights", "activations", "scratch", "graphs", "margin", "arena"):
        assert running["memory_plan"][name] == shown[name]
    assert running["memory_plan"]["weights"] == pytest.approx(running["weight_bytes"], rel=0.02)
    assert running["num_blocks"] == shown["num_blocks"]


def test_rounded_activations_are_refused_for_a_model_without_4_bit_weights(tiny_path, smollm2_path):
    target = Target("cpu", False, False, 8 * GIB, 8 * GIB, 8 * GIB)
    wish = EngineConfig(w4_activations="int8")
    with pytest.raises(ConfigError, match="w4_activations is 'int8', which is for 4-bit weights in bf16 compute"):
        demand_of(open_checkpoint(tiny_path), wish, target)
    with pytest.raises(ConfigError, match="in fp32 has none: it must be auto"):
        demand_of(open_checkpoint(smollm2_path), dataclasses.replace(wish, dtype="fp32"), target)
    assert demand_of(open_checkpoint(smollm2_path), wish, target).dtype == "bf16"
    with pytest.raises(ConfigError, match="w4_prefill 'bf16'"):
        dataclasses.replace(wish, w4_prefill="bf16").check()


def test_a_tied_eight_bit_table_is_counted_twice_where_the_head_has_its_own_order(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    config = EngineConfig(w4_prefill="int4")
    cpu = demand_of(checkpoint, config, Target("cpu", False, False, 8 * GIB, 8 * GIB, 8 * GIB))
    gpu = demand_of(checkpoint, config, card(8 * GIB))
    model = checkpoint.config
    assert gpu.weights - cpu.weights == model.vocab_size * model.hidden_size
    empty = without_pool(config, gpu, card(8 * GIB), 8192)
    assert empty.num_blocks == 0


def test_tiles_of_rows_take_a_fraction_of_the_scratch_that_rows_one_by_one_do():
    """Eight partitions of a context at most, where decode has up to 256."""
    target = card(24 * GIB)
    plans = {
        invariant: plan_memory(EngineConfig(batch_invariant=invariant, max_context=32768), demand("int8"), target)
        for invariant in (True, False)
    }
    assert plans[False].scratch * 2 < plans[True].scratch
    assert plans[False].chunk < plans[True].chunk


def test_captured_steps_have_one_workspace_in_the_plan():
    shared = workspace_bytes(8, QWEN_3B.num_q_heads, QWEN_3B.head_dim, 32768)
    target = card(24 * GIB)
    captured, computed = (
        plan_memory(EngineConfig(cuda_graphs=graphs, max_running=8, max_context=32768), demand("int8"), target)
        for graphs in (True, False)
    )
    assert computed.scratch - captured.scratch == shared
    assert computed.graphs == 0
    logits = 4 * 8 * QWEN_3B.vocab_size
    assert shared + logits < captured.graphs < 2 * (shared + logits)
