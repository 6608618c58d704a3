"""Penalties and filters follow the rules of transformers' logits processors, which compute in fp64 here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from deepinfer.stages.messages import SamplingParams
from deepinfer.stages.model.sampler import Sampler, SampleRow
from deepinfer.stages.model.sampling_draw import uniform
from deepinfer.stages.model.sampling_logits import edit_logits

VOCAB = 3000
DRAWS = 300
PROMPT = np.array([5, 9, 9, 2000, 17], dtype=np.int32)
GENERATED = [9, 40, 41, 40]


def make_logits(seed=0) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def hf_tokens(logits, processors, seed) -> list[int]:
    history = torch.tensor([[*PROMPT.tolist(), *GENERATED]])
    scores = hf.LogitsProcessorList(processors)(history, logits.double())
    cumulative = torch.softmax(scores, -1)[0].numpy().cumsum()
    targets = [uniform(seed, index) * cumulative[-1] for index in range(DRAWS)]
    return [int(np.searchsorted(cumulative, target, side="right")) for target in targets]


def our_tokens(logits, **params) -> list[int]:
    rows = [SampleRow(SamplingParams(**params), index, PROMPT, GENERATED) for index in range(DRAWS)]
    return [chosen.token_id for chosen in Sampler(VOCAB, VOCAB, ()).sample(logits.expand(DRAWS, VOCAB), rows)]


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        ({"temperature": 1.0}, []),
        ({"temperature": 0.6}, [hf.TemperatureLogitsWarper(0.6)]),
        ({"temperature": 1.0, "top_k": 12}, [hf.TopKLogitsWarper(12)]),
        ({"temperature": 1.0, "top_p": 0.7}, [hf.TopPLogitsWarper(0.7)]),
        ({"temperature": 1.0, "min_p": 0.05}, [hf.MinPLogitsWarper(0.05)]),
        (
            {"temperature": 1.4, "top_k": 30, "top_p": 0.8, "min_p": 0.06, "repetition_penalty": 1.4},
            [
                hf.RepetitionPenaltyLogitsProcessor(1.4),
                hf.TemperatureLogitsWarper(1.4),
                hf.TopKLogitsWarper(30),
                hf.TopPLogitsWarper(0.8),
                hf.MinPLogitsWarper(0.06),
            ],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_three_hundred_draws_agree_with_the_processors_of_transformers(params, processors):
    logits = make_logits()
    assert our_tokens(logits, seed=6, **params) == hf_tokens(logits, processors, seed=6)
    assert our_tokens(logits, seed=7, **params) != hf_tokens(logits, processors, seed=6)


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits(penalty):
    logits = make_logits(3)
    seen = [*PROMPT.tolist(), *GENERATED]
    assert {bool(logits[0, token] > 0) for token in seen} == {True, False}
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), logits.clone())[0]
    params = SamplingParams(repetition_penalty=penalty)
    edited = edit_logits(logits[0].numpy(), params, 0, PROMPT, GENERATED, ())
    np.testing.assert_allclose(edited, expected.numpy(), rtol=1e-6)


def test_presence_and_frequency_penalties_count_generated_tokens_only():
    logits = make_logits()[0].numpy()
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    lowered = logits - edit_logits(logits, params, 0, PROMPT, GENERATED, ())
    expected = np.zeros(VOCAB)
    expected[[9, 41]], expected[40] = 0.75, 1.0
    np.testing.assert_allclose(lowered, expected, atol=1e-6)


@pytest.mark.parametrize("index", [0, 3, 4, 9])
def test_min_new_tokens_bans_end_of_sequence_ids_as_transformers_does(index):
    logits, eos = make_logits(), [2, 77]
    processor = hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, eos)
    history = torch.zeros(1, len(PROMPT) + index, dtype=torch.long)
    expected = processor(history, logits.clone())[0].numpy()
    edited = edit_logits(logits[0].numpy(), SamplingParams(min_new_tokens=4), index, PROMPT, [], eos)
    assert np.array_equal(edited, expected)
