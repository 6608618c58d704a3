"""The whole sampler against a plain one: full sort, Python loops, one row at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.stages.messages import SamplingParams
from deepinfer.stages.model.sampler import Sampled, Sampler, SampleRow
from deepinfer.stages.model.sampling_draw import uniform

NO_PROMPT = np.empty(0, dtype=np.int32)


def row(index=0, prompt=NO_PROMPT, generated=(), **params) -> SampleRow:
    return SampleRow(SamplingParams(**params), index, np.asarray(prompt, dtype=np.int32), list(generated))


def sample_one(logits, sample_row, num_valid=None, eos=()) -> Sampled:
    tensor = torch.tensor(np.asarray(logits, dtype=np.float32))[None]
    sampler = Sampler(tensor.shape[1], num_valid or tensor.shape[1], eos)
    return sampler.sample(tensor, [sample_row])[0]


def reference_edit(logits, sample_row, eos) -> np.ndarray:
    params, edited = sample_row.params, logits.astype(np.float32).copy()
    for token, bias in params.logit_bias.items():
        edited[token] += np.float32(bias)
    for token in set(sample_row.prompt.tolist()) | set(sample_row.generated):
        penalty = np.float32(params.repetition_penalty)
        edited[token] = edited[token] / penalty if edited[token] > 0 else edited[token] * penalty
    for token in set(sample_row.generated):
        count = sample_row.generated.count(token)
        edited[token] -= params.frequency_penalty * count + params.presence_penalty
    if sample_row.index < params.min_new_tokens:
        for token in {*eos, *params.stop_token_ids}:
            edited[token] = -np.inf
    return edited


def reference_choose(edited, params, u) -> int:
    order = sorted(range(len(edited)), key=lambda token: (-edited[token], token))
    if params.temperature == 0.0:
        return order[0]
    if params.top_k:
        order = order[: params.top_k]
    shifted = (edited[order].astype(np.float64) - float(edited[order[0]])) / params.temperature
    weight = dict(zip(order, np.exp(shifted).tolist(), strict=True))
    total, kept = math.fsum(weight.values()), []
    for token in order:
        before = math.fsum(weight[other] for other in kept)
        if params.top_p < 1.0 and kept and before >= params.top_p * total:
            break
        kept.append(token)
    kept = sorted(token for token in kept if weight[token] >= params.min_p)
    target, reached = u * math.fsum(weight[token] for token in kept), 0.0
    for token in kept:
        reached += weight[token]
        if reached > target:
            return token
    raise AssertionError("the uniform number was not below 1")


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 0.8, 1.0, 1.7, 10.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.6, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, 7), st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.sampled_from([(), (1,), (3, 5)]),
    min_new_tokens=st.integers(0, 2),
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    params=sampling_params,
    num_valid=st.integers(8, 300),
    padding=st.integers(0, 20),
    decimals=st.sampled_from([0, 1, 6]),
    data_seed=st.integers(0, 2**32 - 1),
)
def test_any_request_gets_the_token_of_the_plain_full_sort(params, num_valid, padding, decimals, data_seed):
    rng = np.random.default_rng(data_seed)
    logits = np.round(rng.normal(0, rng.choice([0.5, 3.0, 8.0]), num_valid), decimals).astype(np.float32)
    sample_row = SampleRow(
        params,
        int(rng.integers(0, 4)),
        rng.integers(0, num_valid, rng.integers(1, 30)).astype(np.int32),
        rng.integers(0, num_valid, rng.integers(0, 30)).tolist(),
    )
    expected = reference_choose(
        reference_edit(logits, sample_row, (2,)), params, uniform(params.seed, sample_row.index)
    )
    padded = np.concatenate((logits, np.full(padding, 1e4, dtype=np.float32)))
    assert sample_one(padded, sample_row, num_valid, (2,)) == Sampled(expected)


def mixed_rows() -> list[SampleRow]:
    history = {"prompt": [1, 2, 3, 3], "generated": [4, 4, 5]}
    return [
        row(),
        row(temperature=0.8, seed=1, index=3),
        row(temperature=1.0, top_p=0.9, seed=1, index=3),
        row(temperature=1.2, top_k=40, seed=2**63, logprobs=4),
        row(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.5, seed=7, **history),
        row(presence_penalty=1.0, logit_bias={9: 3.0}, **history),
        row(temperature=2.0, top_p=0.99, min_p=0.01, seed=11, index=900),
    ]


def mixed_logits(vocab_size=5000) -> torch.Tensor:
    return torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(5)) * 2


def test_a_row_gets_the_same_token_alone_and_at_every_place_of_a_batch():
    rows, logits, sampler = mixed_rows(), mixed_logits(), Sampler(5000, 4990, (2,))
    alone = [sampler.sample(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
    for shift in range(len(rows)):
        order = np.roll(np.arange(len(rows)), shift)
        batch = sampler.sample(logits[order], [rows[i] for i in order])
        assert batch == [alone[i] for i in order]


def test_neither_the_global_generators_nor_the_thread_count_change_a_token():
    rows, logits, sampler = mixed_rows(), mixed_logits(50_000), Sampler(50_000, 50_000, ())
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch.manual_seed(count)
            np.random.seed(count)
            results.append(sampler.sample(logits, rows))
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1]


def test_the_logits_are_left_as_they_were():
    logits = mixed_logits()
    before = logits.clone()
    Sampler(5000, 5000, (2,)).sample(logits, mixed_rows())
    assert torch.equal(logits, before)


def test_greedy_takes_the_lowest_id_of_several_highest_logits():
    assert sample_one([0.0, 3.0, 3.0, 1.0], row()).token_id == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_is_never_chosen_whatever_it_holds(temperature):
    logits = [0.0, 1.0, 1e30, math.nan, math.inf]
    tokens = {sample_one(logits, row(temperature=temperature, index=i), 2).token_id for i in range(40)}
    assert tokens == ({1} if temperature == 0.0 else {0, 1})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_with_a_nonfinite_logit_gets_an_error_and_the_others_their_token(bad, temperature):
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    sampler, rows = Sampler(200, 200, ()), [row(temperature=temperature, index=i) for i in range(3)]
    good = sampler.sample(logits, rows)
    logits[1, 150] = bad
    result = sampler.sample(logits, rows)
    assert result[1].token_id == -1
    assert result[1].error == f"non-finite logits: {int(bad != bad)} NaN and {int(bad == bad)} +inf among 200"
    assert [result[0], result[2]] == [good[0], good[2]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_minus_infinity_means_never_and_a_row_of_nothing_else_is_an_error(temperature):
    low = -math.inf
    assert sample_one([low, 0.0, low], row(temperature=temperature, logprobs=3)) == Sampled(1, 0.0, ((1, 0.0),))
    assert "all 3 are -inf" in sample_one([low] * 3, row(temperature=temperature)).error


def test_a_bias_of_100_decides_and_one_of_minus_100_excludes():
    logits = np.linspace(0, 5, 50)
    for index in range(50):
        assert sample_one(logits, row(temperature=1.0, index=index, logit_bias={0: 100.0})).token_id == 0
        chosen = sample_one(logits, row(temperature=1.0, index=index, logit_bias={49: -100.0})).token_id
        assert chosen != 49


def test_a_bias_on_an_unknown_token_is_an_error_of_that_row_alone():
    logits = torch.zeros(2, 12)
    result = Sampler(12, 10, ()).sample(logits, [row(logit_bias={10: 1.0}), row()])
    assert result[0].error == "logit_bias names token 10; token ids go from 0 to 9"
    assert result[1] == Sampled(0)


def test_eos_and_stop_ids_wait_for_min_new_tokens():
    logits = [9.0, 8.0, 0.0, 1.0]
    params = {"min_new_tokens": 3, "stop_token_ids": (1, 99, -1)}
    chosen = [sample_one(logits, row(index=i, **params), eos=(0, 400)).token_id for i in range(5)]
    assert chosen == [3, 3, 3, 0, 0]


def test_a_row_whose_every_token_is_banned_gets_an_error():
    result = sample_one([1.0, 2.0], row(min_new_tokens=1, stop_token_ids=(1,)), eos=(0,))
    assert result.token_id == -1
    assert "no token can be chosen" in result.error


@pytest.mark.parametrize("temperature", [1e-6, 10.0])
def test_extreme_temperatures_give_valid_tokens_without_a_warning(temperature):
    logits = np.random.default_rng(0).normal(0, 30, 2000)
    logits[77] = 400.0
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        chosen = {sample_one(logits, row(temperature=temperature, index=i)).token_id for i in range(30)}
    assert chosen == {77}
    spread = {sample_one(logits / 30, row(temperature=temperature, index=i)).token_id for i in range(30)}
    assert (len(spread) == 1) == (temperature < 1)


def test_logprobs_are_the_log_softmax_of_the_unedited_valid_logits():
    logits = np.random.default_rng(3).normal(0, 4, 500).astype(np.float32)
    expected = torch.log_softmax(torch.tensor(logits[:480], dtype=torch.float64), 0)
    params = {"temperature": 1.5, "logit_bias": {5: 50.0}, "logprobs": 6, "repetition_penalty": 2.0}
    result = sample_one(logits, row(prompt=[1, 2], **params), 480)
    values, ids = expected.topk(6)
    assert result.token_id == 5
    assert result.logprob == pytest.approx(expected[5].item(), abs=1e-9)
    assert [token for token, _ in result.top] == ids.tolist()
    assert [logprob for _, logprob in result.top] == pytest.approx(values.tolist(), abs=1e-9)


def test_logprobs_of_huge_logits_do_not_overflow():
    assert sample_one([4096.0, 4096.0, -4096.0], row(logprobs=1)) == Sampled(
        0, pytest.approx(-math.log(2)), ((0, pytest.approx(-math.log(2))),)
    )


def test_zero_logprobs_means_that_of_the_chosen_token_only():
    assert sample_one([0.0, 0.0], row(logprobs=0)) == Sampled(0, pytest.approx(-math.log(2)), ())


def test_logits_of_another_shape_or_dtype_are_refused():
    sampler = Sampler(8, 8, ())
    for logits in (torch.zeros(2, 8), torch.zeros(1, 9), torch.zeros(1, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"must be torch.float32 \(1, 8\)"):
            sampler.sample(logits, [row()])
    with pytest.raises(ValueError, match="num_valid_tokens is 9, must be from 1 to vocab_size = 8"):
        Sampler(8, 9, ())


# --- rows that are decided where the logits lie ------------------------------------------------------------------


@pytest.fixture(scope="module", params=["cpu", "host-emulation"])
def kernel_argmax(request):
    from deepinfer.kernels.devices import open_device

    return open_device(request.param).argmax


def hard_logits(seed) -> torch.Tensor:
    """Few values, so that the highest is there many times; rows with NaN, +inf, -inf, and nothing but -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (7, 1500), generator=generator).float()
    for row, value in ((1, math.nan), (3, math.inf), (5, -math.inf)):
        logits[row, int(torch.randint(1400, (1,), generator=generator))] = value
    logits[6] = -math.inf
    return logits


@pytest.mark.parametrize("seed", range(4))
def test_a_step_with_the_argmax_kernel_gives_what_the_sampler_gives_without_it(kernel_argmax, seed):
    logits, rows = hard_logits(seed), [row(temperature=0.0), *mixed_rows()][:7]
    rows = rows[seed:] + rows[:seed]
    plain, asked = Sampler(1500, 1480, (2,)), []

    def argmax(*args):
        asked.append(args)
        return kernel_argmax(*args)

    assert Sampler(1500, 1480, (2,), argmax).sample(logits, rows) == plain.sample(logits, rows)
    assert asked
    greedy = [row(temperature=0.0, index=index) for index in range(7)]
    assert Sampler(1500, 1480, (2,), argmax).sample(logits, greedy) == plain.sample(logits, greedy)


def test_greedy_rows_are_not_looked_at_on_the_host_and_an_argmax_of_another_rule_shows(monkeypatch):
    logits, rows = hard_logits(0), [row(temperature=0.0)] * 7
    looked_at, sample_row = [], Sampler._sample_row

    def noted(self, raw, sample):
        looked_at.append(raw)
        return sample_row(self, raw, sample)

    monkeypatch.setattr(Sampler, "_sample_row", noted)

    def highest_id_of_equals(values, num_valid):
        valid = values[:, :num_valid].nan_to_num(math.inf, math.inf, -math.inf)
        last = num_valid - 1 - valid.flip(1).argmax(dim=1)
        return torch.where(valid.amax(dim=1).isfinite(), last, -1).int()

    got = Sampler(1500, 1480, (), highest_id_of_equals).sample(logits, rows)
    assert len(looked_at) == 3
    assert got != Sampler(1500, 1480, ()).sample(logits, rows)


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"logprobs": 0}, {"logit_bias": {3: 1.0}}, {"repetition_penalty": 1.2}]
)
def test_what_needs_the_logits_is_not_left_to_the_argmax(params):
    def argmax(*_):
        raise AssertionError("not for this row")

    Sampler(1500, 1480, (2,), argmax).sample(hard_logits(0)[:1], [row(**{"temperature": 0.0, **params}, prompt=[3])])
