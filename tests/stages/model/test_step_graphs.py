"""Decode steps replayed from graphs, through the host shim, beside the same steps computed as they come."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantised_folders import act_order
from step_runs import MAX_CONTEXT, MAX_ROWS, NUM_BLOCKS, Sequences, Side, random_run
from tiny import save_tiny_llama
from tiny_checkpoints import tiny_model

from deepinfer.kernels.attention import AttentionBatch
from deepinfer.kernels.cuda import step_capture
from deepinfer.kernels.cuda.decode_plan import workspace_bytes
from deepinfer.kernels.devices import open_device
from deepinfer.stages.model import load_model, open_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Batch-invariant, so that padding a step must not change a bit."""
    checkpoint = open_checkpoint(save_tiny_llama(tmp_path_factory.mktemp("tiny"), head_dim=64))
    return load_model(checkpoint, "bf16", batch_invariant=True, ops=open_device("host-emulation"))


@pytest.mark.parametrize("fmt", ["int8", "e4m3/e5m2"])
def test_replayed_steps_are_bit_equal_to_computed_ones_in_logits_and_in_the_pool(model, fmt):
    same, graphs = random_run(model, fmt, seed=3)
    assert same
    rows, contexts = (set(values) for values in zip(*graphs.captured, strict=True))
    assert rows >= {1, 2, 4}
    assert len(contexts) >= 3
    assert graphs.replays >= 10


def test_layers_in_groups_are_replayed_from_tables_of_their_own(model):
    same, graphs = random_run(model, "int8", seed=3, groups=((1,), (0,)))
    assert same
    assert graphs.replays >= 3


def test_columns_in_act_order_are_part_of_the_captured_step(tmp_path):
    sizes = {"vocab_size": 264, "hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "num_hidden_layers": 2}
    checkpoint = open_checkpoint(act_order(tiny_model("llama", **sizes), tmp_path).write())
    act_ordered = load_model(checkpoint, batch_invariant=True, ops=open_device("host-emulation"))
    same, graphs = random_run(act_ordered, "int8", seed=3, steps=12)
    assert same
    assert graphs.replays >= 3


def test_all_captured_steps_share_one_workspace_as_large_as_the_largest_needs(model):
    capture = Side(model, "int8", graphs=True).graphs._capture
    every = [capture.buffers(rows, context).attention.workspace for rows in (1, 4, 5) for context in (8, 32, 40)]
    assert len({rows.queries.untyped_storage().data_ptr() for rows in every}) == 1
    needed = workspace_bytes(MAX_ROWS, model.config.num_q_heads, model.config.head_dim, MAX_CONTEXT)
    assert every[0].queries.untyped_storage().nbytes() == needed


def test_a_step_replayed_with_stale_inputs_shows(model, monkeypatch):
    """The control: without the copy of the inputs, the run above must notice."""
    fill = step_capture.CudaStepBuffers.fill
    filled = set()

    def fill_once(self, token_ids, batch):
        if self not in filled:
            fill(self, token_ids, batch)
        filled.add(self)

    monkeypatch.setattr(step_capture.CudaStepBuffers, "fill", fill_once)
    assert not random_run(model, "int8", seed=3)[0]


@pytest.mark.parametrize("part", ["token_ids", "positions", "block_tables"])
def test_every_input_that_a_replay_does_not_get_shows(model, monkeypatch, part):
    fill = step_capture.CudaStepBuffers.fill

    def all_but_one(self, token_ids, batch):
        workspace = self.attention.workspace
        memories = {
            "token_ids": self.token_ids,
            "positions": workspace.positions,
            "block_tables": workspace.block_tables[0],
        }
        memory = memories[part]
        before = memory.clone()
        fill(self, token_ids, batch)
        memory.copy_(before)

    monkeypatch.setattr(step_capture.CudaStepBuffers, "fill", all_but_one)
    assert not random_run(model, "int8", seed=3)[0]


def test_padding_that_is_no_padding_shows_in_the_pool(model, monkeypatch):
    """The control of the rows that are not used: at position 0 instead of -1 they write into block 0."""
    monkeypatch.setattr(step_capture, "PADDING", 0)
    assert not random_run(model, "int8", seed=3)[0]


def test_a_row_that_is_not_finite_is_flagged_in_its_own_step_only(model):
    side, sequences = Side(model, "int8", graphs=True), Sequences(0)
    for length in (3, 5, 9):
        name = sequences.start(length)
        side.executor.forward(sequences.batch([(name, 0, length)]))
        sequences.tokens[name].append(1)
    spans = [(name, length, length + 1) for name, length in zip((1, 2, 3), (3, 5, 9), strict=True)]
    side.executor.forward(sequences.batch(spans))

    flagged = []
    for bad in (True, False):
        batch = sequences.batch(spans)
        embedding = model.embedding
        table = embedding._table
        kept = table[7].clone()
        with torch.inference_mode():
            table[7] = float("nan") if bad else kept
            batch.token_ids[1] = 7 if bad else 1
            side.executor.forward(batch)
            table[7] = kept
        flagged.append(batch.attention.nonfinite_rows.tolist())
    assert flagged == [[False, True, False], [False, False, False]]
    assert side.graphs.replays == 2


@pytest.mark.parametrize(
    ("positions", "tables", "message"),
    [
        ([3, 5], [[0], [NUM_BLOCKS]], "outside the pool"),
        ([3, 32], [[0] * 5, [1] * 5], "past a context"),
        ([3, -1], [[0], [1]], "outside"),
        ([3, 4, 5], [[0], [1], [2]], "do not fit"),
    ],
)
def test_inputs_that_do_not_fit_a_captured_step_are_refused(model, positions, tables, message):
    buffers = Side(model, "int8", graphs=True).graphs._capture.buffers(2, 32)
    rows = len(positions)
    batch = AttentionBatch(positions, np.arange(rows), tables, np.arange(rows + 1))
    with pytest.raises(ValueError, match=message):
        buffers.fill(torch.zeros(rows, dtype=torch.int32), batch)


def test_prefill_chunks_and_steps_past_the_limits_are_not_taken(model):
    graphs = Side(model, "int8", graphs=True).graphs
    one_each = AttentionBatch([3, 5], [0, 1], [[0], [1]], [0, 1, 2])
    assert graphs.takes(one_each, 2)
    assert not graphs.takes(one_each, 1)
    assert not graphs.takes(AttentionBatch([3, 4], [0, 0], [[0]], [0, 2]), 2)
    many = np.arange(MAX_ROWS + 1)
    assert not graphs.takes(AttentionBatch(many, many, many[:, None], np.arange(MAX_ROWS + 2)), MAX_ROWS + 1)
    assert not graphs.takes(AttentionBatch([MAX_CONTEXT], [0], [[0] * 6], [0, 1]), 1)
