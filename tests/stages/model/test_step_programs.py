"""Decode steps of the CPU replayed from programs, beside the same steps computed as they come."""

from __future__ import annotations

import itertools

import pytest
import torch
from quantised_folders import act_order
from step_runs import MAX_ROWS, Sequences, Side, random_run
from tiny import save_tiny_family, save_tiny_llama
from tiny_checkpoints import tiny_model

from deepinfer.kernels import packed_linear
from deepinfer.kernels.attention import AttentionBatch
from deepinfer.kernels.cpu import bf16_dot, paged_attention, step_programs
from deepinfer.kernels.cpu.step_programs import Step
from deepinfer.kernels.cpu.tasks import Program, Recording, recording
from deepinfer.kernels.devices import open_device
from deepinfer.stages.model import load_model, open_checkpoint
from deepinfer.stages.model.embedding import HeadEmbedding, ScaledEmbedding


@pytest.fixture(scope="module")
def checkpoint_path(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(checkpoint_path):
    return load_model(open_checkpoint(checkpoint_path), "bf16")


@pytest.mark.parametrize("fmt", ["fp16", "int8", "e4m3/e5m2"])
def test_replayed_steps_are_bit_equal_to_computed_ones_in_logits_and_in_the_pool(model, fmt):
    same, programs = random_run(model, fmt, seed=3, steps=40)
    assert same
    assert {rows for rows, _ in programs.captured} >= set(range(1, MAX_ROWS + 1))
    assert programs.replays >= 20
    assert programs.in_use


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma2", {"sliding_window": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
        ("gemma3_text", {"sliding_window": 12, "num_hidden_layers": 7}),
        ("olmo2", {}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("phi3", {}),
    ],
)
def test_what_a_family_has_beside_llama_is_part_of_the_recorded_step(tmp_path, family, fields):
    path = save_tiny_family(tmp_path, family, **fields)
    same, programs = random_run(load_model(open_checkpoint(path), "bf16"), "int8", seed=3, steps=12)
    assert same
    assert programs.in_use
    assert programs.replays >= 5


def test_layers_in_groups_are_replayed_from_tables_of_their_own(model):
    same, programs = random_run(model, "int8", seed=3, steps=20, groups=((1,), (0,)))
    assert same
    assert programs.replays >= 10


def test_columns_in_act_order_are_part_of_the_recorded_step(tmp_path):
    sizes = {"vocab_size": 264, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
    checkpoint = open_checkpoint(act_order(tiny_model("llama", **sizes), tmp_path).write())
    same, programs = random_run(load_model(checkpoint), "int8", seed=3, steps=12)
    assert same
    assert programs.in_use
    assert programs.replays >= 5


def test_steps_that_round_activations_to_8_bits_are_replayed_as_well(smollm2_path):
    model = load_model(open_checkpoint(smollm2_path), ops=open_device("cpu", "int8"))
    same, programs = random_run(model, "int8", seed=3, steps=12)
    assert same
    assert programs.in_use


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads_computes_the_same(model, monkeypatch, threads):
    """More workers than threads as well: the last ones then come when everything is done."""
    monkeypatch.setattr(step_programs.numba, "get_num_threads", lambda: threads)
    assert random_run(model, "int8", seed=5, steps=20)[0]


def test_steps_whose_contexts_threads_share_are_programs_of_their_own(tmp_path, monkeypatch):
    """Every other step, however short its contexts are."""
    wide = load_model(open_checkpoint(save_tiny_llama(tmp_path / "wide", head_dim=64)), "bf16")
    counts = itertools.cycle([0, 1, 4])
    monkeypatch.setattr(paged_attention.NumbaAttention, "segments", lambda self, batch: next(counts))
    same, programs = random_run(wide, "int8", seed=3, steps=40)
    assert same
    assert {segments for _, segments in programs._steps} == {0, 1, 4}
    assert programs.replays >= 20


@pytest.mark.parametrize("part", ["token_ids", "positions", "block_tables"])
def test_every_input_that_a_replay_does_not_get_shows(model, monkeypatch, part):
    fill = step_programs.Step.fill

    def all_but_one(self, token_ids, batch):
        stale = self.token_ids.numpy() if part == "token_ids" else getattr(self.batch, part)
        before = stale.copy()
        fill(self, token_ids, batch)
        stale[:] = before

    monkeypatch.setattr(step_programs.Step, "fill", all_but_one)
    assert not random_run(model, "int8", seed=3)[0]


def test_a_row_that_is_not_finite_is_flagged_in_its_own_step_only(model):
    side, sequences = Side(model, "int8", graphs=True), Sequences(0)
    names = [sequences.start(3), sequences.start(3)]
    side.executor.forward(sequences.batch([(name, 0, 3) for name in names]))
    spans = [(name, 2, 3) for name in names]
    weight = model.layers[1].input_norm
    before = weight.clone()
    clean = sequences.batch(spans)
    side.executor.forward(clean)
    broken = sequences.batch(spans[:1])
    with torch.inference_mode():
        weight.fill_(float("nan"))
        try:
            side.executor.forward(broken)
        finally:
            weight.copy_(before)
    after = sequences.batch(spans)
    side.executor.forward(after)
    assert not clean.attention.nonfinite_rows.any()
    assert broken.attention.nonfinite_rows.all()
    assert not after.attention.nonfinite_rows.any()
    layer, counts = max(enumerate(side.executor.attention.kv_counts()), key=lambda item: item[1][1])
    assert (layer, counts[1] > 0) == (1, True)


def test_a_model_that_cannot_be_recorded_runs_call_by_call_and_says_so(checkpoint_path, caplog):
    fp32 = load_model(open_checkpoint(checkpoint_path), "fp32")
    same, programs = random_run(fp32, "fp16", seed=3)
    assert same
    assert not programs.in_use
    assert programs.captured == []
    assert "decode steps run call by call: the dense fp32 matmul cannot be part of a recorded step" in caplog.text


def test_a_step_that_would_read_outside_the_pool_is_refused(model):
    side, sequences = Side(model, "int8", graphs=True), Sequences(0)
    name = sequences.start(3)
    sequences.tables[name] = [99]
    with pytest.raises(ValueError, match="block ids 99"):
        side.executor.forward(sequences.batch([(name, 2, 3)]))


def test_every_unit_of_a_replayed_step_is_done_once(model):
    num_tasks = 0
    side, sequences = Side(model, "int8", graphs=True), Sequences(0)
    name = sequences.start(3)
    batch = sequences.batch([(name, 2, 3)])
    side.executor.forward(batch)
    (step,) = side.graphs._steps.values()
    with torch.inference_mode():
        step.run(batch.token_ids, batch.attention, 2)  # one worker alone counts nothing
    for program in step._recording._steps:
        if isinstance(program, Program):
            num_tasks += len(program._tasks)
            assert (program._counters[:, 1] == program._tasks[:, 1]).all()
    converted = 0 if bf16_dot.available() else 1  # a task for the rows of each matmul
    assert num_tasks == 2 * (8 + 4 * converted) + 2 + converted


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_recorded_step_reads_the_embeddings_of_the_tokens_that_it_is_given(scale):
    weights = torch.randn(64, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    embedding = HeadEmbedding(packed_linear.PackedLinear(packed_linear.P_BF16, weights))
    if scale != 1.0:
        embedding = ScaledEmbedding(embedding, scale)
    ops = open_device("cpu")
    step = Step(2, 1, 1, 0, lambda ids, batch: ops.embed(embedding, ids))
    for ids in ([5, 63], [0, 5]):
        given = torch.tensor(ids, dtype=torch.int32)
        step.run(given, AttentionBatch([0, 0], [0, 1], [[0], [0]], [0, 1, 2]), 1)
        assert torch.equal(step.logits, weights[ids].float() * scale)


def test_what_nobody_waits_for_runs_behind_all_tasks():
    with recording() as taken:
        order = []
        taken.afterwards(lambda: order.append("afterwards"))
        taken.call(lambda: order.append("call"))
    Recording(taken).run(1)
    assert order == ["call", "afterwards"]
