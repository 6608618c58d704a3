"""`kv-quality` on a tiny model: what it measures runs over stored bytes, and its figures tell good formats from bad."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from reference import greedy_ids, load_reference, teacher_forced_logits
from tiny import MAX_CONTEXT, byte_tokenizer, save_tiny_qwen2

from deepinfer.daemon.cli import main
from deepinfer.daemon.quality.config import OWN_TEXT, KvQuality
from deepinfer.daemon.quality.key_offset import with_key_offset
from deepinfer.daemon.quality.measure import divergence, first_divergence
from deepinfer.daemon.quality.paged import PagedModel
from deepinfer.daemon.quality.report import gate_failures
from deepinfer.daemon.quality.text import PASSKEY, read_material
from deepinfer.daemon.setting import ConfigError
from deepinfer.kernels import resolve_kv_format
from deepinfer.stages.model import Model, Tokenizer, load_model, load_tokenizer, open_checkpoint
from deepinfer.stages.model.tokenizer import TokenizerFacts

SIZES = {
    "threads": 1,
    "positions": 150,
    "window": 90,
    "skip": 15,
    "chunk": 32,
    "prompts": 3,
    "new_tokens": 24,
    "passkey_tokens": "300,400",
    "passkey_depths": "0,1",
}
FORMATS = ["fp16", "int8", "fp8_e4m3", "fp8_e5m2", "int8/fp8_e5m2"]


def run(model: Path, formats: str, *more: str) -> Result:
    sizes = [part for name, value in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return CliRunner().invoke(
        main, ["kv-quality", "--model", str(model), "--formats", formats, *sizes, *more], catch_exceptions=False
    )


@pytest.fixture(scope="module")
def measured(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str, Path]:
    """The report of all formats, what was printed, and the picture."""
    folder = tmp_path_factory.mktemp("kv-quality")
    output, plot = folder / "sub" / "report.json", folder / "plot.png"
    result = run(tiny_path, ",".join(FORMATS), "--output", str(output), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    return json.loads(output.read_text()), result.stdout, plot


@pytest.fixture(scope="module")
def model(tiny_path: Path) -> Model:
    return load_model(open_checkpoint(tiny_path), "fp32")


def paged(model: Model, name: str = "auto", chunk: int = 32, tokens: int = 256) -> PagedModel:
    return PagedModel(model, resolve_kv_format(name, "fp32"), tokens, chunk)


def random_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 257, count).tolist()


def test_formats_come_in_the_order_of_their_precision(measured):
    rows = measured[0]["formats"]
    assert list(rows) == FORMATS
    for worse, better in zip(FORMATS[1:4], FORMATS[:3], strict=True):
        for figure in ("mean", "p99"):
            assert rows[worse]["kld"][figure] > 1.5 * rows[better]["kld"][figure], (worse, better, figure)
    assert rows["fp16"]["top1_percent"] > rows["fp8_e5m2"]["top1_percent"]
    assert rows["int8"]["kld"]["mean"] < rows["int8/fp8_e5m2"]["kld"]["mean"] < rows["fp8_e5m2"]["kld"]["mean"]
    assert rows["fp16"]["same_texts"] >= rows["fp8_e5m2"]["same_texts"]


def test_the_report_says_what_was_measured_where_and_how(measured):
    report, printed, _ = measured
    assert {"command", "machine", "versions", "date", "model", "model_sha256", "engine", "settings"} <= set(report)
    assert len(report["model_sha256"]) == 64
    assert "checkpoint" not in report["engine"], "a path of this machine"
    assert report["baseline"]["format"] == "fp32"
    assert report["settings"]["formats"] == FORMATS
    for name, row in report["formats"].items():
        assert row["positions"] == report["baseline"]["positions"] == 150
        assert set(row["kld"]) == {"mean", "p99", "max"}
        assert 0 <= row["kld"]["mean"] <= row["kld"]["p99"] <= row["kld"]["max"]
        assert len(row["first_divergence"]) == 3
        assert len(row["passkeys"]) == len(report["passkey_prompts"]) == 4
        assert name in printed
    layers, heads, head_dim = 2, 2, 16
    assert report["formats"]["fp16"]["bytes_per_token"] == layers * heads * 2 * head_dim * 2
    assert report["formats"]["int8"]["bytes_per_token"] == layers * heads * 2 * (head_dim + 2)


def test_the_picture_is_one(measured):
    assert measured[2].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(tiny_path, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    result = run(tiny_path, "int8", "--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 78
    assert "deepinfer-daemon[plot]" in result.output
    assert "passkeys" not in result.output


def test_the_gate_decides_the_exit_code(tiny_path, measured):
    """On either side of what was measured before: the same run gives the same figures."""
    row = measured[0]["formats"]["int8"]
    kld, top1 = row["kld"]["mean"], row["top1_percent"]
    passed = run(tiny_path, "int8", "--max-kld", str(kld * 1.01), "--min-top1", str(top1 - 0.01))
    assert passed.exit_code == 0, passed.output
    failed = run(tiny_path, "int8", "--max-kld", str(kld * 0.99))
    assert failed.exit_code == 1
    assert "FAILED int8: mean KLD" in failed.output


@pytest.mark.parametrize(
    ("kld", "top1", "failures"),
    [(1e-3, 98.0, 0), (1.001e-3, 98.0, 1), (1e-3, 97.9, 1), (1.0, 1.0, 2), (float("nan"), float("nan"), 2)],
)
def test_a_limit_may_be_reached_but_not_passed(kld, top1, failures):
    rows = {"good": {"kld": {"mean": 0.0}, "top1_percent": 100.0}, "x": {"kld": {"mean": kld}, "top1_percent": top1}}
    said = gate_failures({"gate": {"max_kld": 1e-3, "min_top1": 98.0}, "formats": rows})
    assert len(said) == failures
    assert all(line.startswith("x: ") for line in said)
    assert gate_failures({"gate": {"max_kld": None, "min_top1": None}, "formats": rows}) == []


@pytest.mark.parametrize(("chunk", "first"), [(1, 0), (7, 30), (32, 64), (64, 63), (200, 99), (20, 98)])
def test_rows_in_chunks_are_those_of_a_dense_forward(tiny_path, model, chunk, first):
    """Every row from `first` on whose next token is known, and no other, wherever the chunks end."""
    ids = random_ids(101)
    expected = teacher_forced_logits(load_reference(tiny_path), ids)[first:100]
    got = torch.cat(list(paged(model, chunk=chunk).logits(ids, first)))
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-3)


def test_greedy_texts_side_by_side_are_those_of_generate(tiny_path, model):
    prompts = [random_ids(count, count) for count in (5, 40, 33)]
    reference = load_reference(tiny_path)
    got = paged(model).greedy(prompts, 12)
    for prompt, ours in zip(prompts, got, strict=True):
        theirs = greedy_ids(reference, prompt, 12)
        assert ours[: len(theirs)] == theirs


def test_an_answer_counts_if_every_token_is_the_greedy_one(model):
    prompt = random_ids(70)
    subject = paged(model)
    (answer,) = subject.greedy([prompt], 5)
    assert subject.answers(prompt, answer)
    for index in range(5):
        wrong = [*answer[:index], (answer[index] + 1) % 257, *answer[index + 1 :]]
        assert not subject.answers(prompt, wrong)


@pytest.mark.parametrize("side", ["k", "v", "nothing"])
def test_what_later_chunks_say_depends_on_the_stored_bytes(model, side):
    """Control: wrong codes in the pool after the first chunk show as divergence; the same run without them has none."""
    ids = random_ids(101)
    expected = torch.cat(list(paged(model, "int8").logits(ids, 40)))
    subject = paged(model, "int8")
    layout, pieces = subject.pool.layout, []
    for count, rows in enumerate(subject.logits(ids, 40)):
        pieces.append(rows)
        if count == 0 and side != "nothing":
            begin = layout.layer_offsets(0).k if side == "k" else layout.layer_offsets(0).v
            subject.pool.data[:, begin : begin + layout.k_bytes] ^= 0x40
    kld = divergence(torch.cat(pieces), expected)
    first = len(pieces[0])
    assert float(kld[:first].max()) == 0
    if side == "nothing":
        assert float(kld.max()) == 0
    else:
        assert float(kld[first:].mean()) > 0.01


def test_the_compute_dtype_alone_leaves_nothing_to_compare_and_is_refused(tiny_path):
    result = run(tiny_path, "fp32,auto,fp32/fp32")
    assert result.exit_code == 78
    assert "name another format" in result.output


def test_divergence_is_that_of_torch_and_zero_for_equal_rows():
    generator = torch.Generator().manual_seed(1)
    exact, got = (torch.randn(70, 50, generator=generator) * 5 for _ in range(2))
    log_p, log_q = exact.double().log_softmax(-1), got.double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(divergence(got, exact), expected)
    assert float(divergence(exact, exact.clone()).abs().max()) == 0
    skewed = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert float(divergence(*skewed)) == pytest.approx(0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25), abs=1e-6)


@pytest.mark.parametrize(
    ("got", "exact", "index"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 4], [1, 2, 3], 2),
        ([5, 2, 3], [1, 2, 3], 0),
        ([1, 9, 4], [1, 9, 3], None),
        ([1, 9, 3], [1, 2, 3], 1),
        ([1, 2, 3], [1, 9, 3], 1),
    ],
)
def test_texts_are_compared_up_to_the_first_end_token(got, exact, index):
    assert first_divergence(got, exact, frozenset({9})) == index


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"formats": "int8,int5"}, "int5"),
        ({"window": 16, "skip": 15}, "skip"),
        ({"passkey_tokens": "300,x"}, "passkey_tokens"),
        ({"passkey_depths": "0.5,1.5"}, "passkey_depths"),
        ({"min_top1": 101.0}, "min_top1"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(change, name):
    with pytest.raises(ConfigError, match=name):
        KvQuality(**{**SIZES, **change}).check()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"positions": 100_000}, "positions"),
        ({"prompts": 100_000}, "prompts"),
        ({"passkey_tokens": "50"}, "passkey_tokens"),
        ({"text": "/nonexistent/text"}, "text"),
    ],
)
def test_texts_that_do_not_suffice_are_refused_by_name(tiny_path, change, name):
    with pytest.raises(ConfigError, match=name):
        read_material(KvQuality(**{**SIZES, **change}), load_tokenizer(tiny_path))


def test_a_window_beyond_the_context_of_the_model_is_refused(tiny_path):
    result = run(tiny_path, "int8", "--passkey-tokens", str(2 * MAX_CONTEXT))
    assert result.exit_code == 78
    assert str(MAX_CONTEXT) in result.output


class BeginTokenizer(Tokenizer):
    """One that puts a begin token before every text."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [0] * add_special + super().encode(text, add_special=False)


def test_windows_prompts_and_passkeys_begin_as_texts_do_and_count_what_was_asked_for(tiny_path):
    plain, begun = load_tokenizer(tiny_path), BeginTokenizer(byte_tokenizer(), TokenizerFacts((0,), {}))
    settings = KvQuality(**SIZES)
    text = plain.encode(OWN_TEXT.read_text(), add_special=False)
    material = read_material(settings, begun)
    assert sum(len(window) - settings.skip - 1 for window in material.windows) == settings.positions
    assert [token for window in material.windows for token in window[1:]] == text[: sum(map(len, material.windows)) - 3]
    for ids in (*material.windows, *material.prompts, *(passkey.prompt for passkey in material.passkeys)):
        assert ids[0] == 0
        assert 0 not in ids[1:]
    for passkey in material.passkeys:
        assert passkey.tokens - 100 < len(passkey.prompt) <= passkey.tokens
        said = plain.decode(passkey.prompt)
        assert plain.decode(passkey.answer) == PASSKEY
        assert said.endswith("The pass key is")
        place = said.index("The pass key is" + PASSKEY) / len(said)
        assert place < 0.3 if passkey.depth == 0 else place > 0.5


def test_the_text_that_comes_with_it_is_long_enough_for_the_real_model(smollm2_path):
    settings = KvQuality()
    material = read_material(settings, load_tokenizer(smollm2_path))
    assert sum(len(window) - settings.skip - 1 for window in material.windows) == settings.positions >= 1500
    assert len(material.prompts) == 20
    assert max(len(passkey.prompt) for passkey in material.passkeys) > 950


def test_keys_with_large_biases_are_stored_as_the_engine_would_store_them(tmp_path):
    """Split for E4M3 keys, as `auto` decides for their format and not for the exact one; inline costs what it costs."""
    model = save_tiny_qwen2(tmp_path / "biased", {7: 600.0, 15: -900.0, 22: 700.0})
    rows = {}
    for mode in ("auto", "inline"):
        result = run(model, "fp8_e4m3", "--kv-key-bias", mode, "--output", str(tmp_path / mode))
        assert result.exit_code == 0, result.output
        rows[mode] = json.loads((tmp_path / mode).read_text())["formats"]["fp8_e4m3"]
    assert 0 < 3 * rows["auto"]["kld"]["mean"] < rows["inline"]["kld"]["mean"]
    assert rows["auto"]["kv_saturated"] == 0 < rows["inline"]["kv_saturated"]


def test_large_constants_in_keys_cost_int8_its_precision_unless_they_are_stored_apart(tiny_path, tmp_path):
    """The model with the constant in its exact cache is what all are compared with."""
    klds = {}
    for name, more in {
        "without": (),
        "inline": ("--key-offset", "300", "--kv-key-bias", "inline"),
        "split": ("--key-offset", "300", "--kv-key-bias", "split"),
        "auto": ("--key-offset", "300"),
    }.items():
        output = tmp_path / f"{name}.json"
        result = run(tiny_path, "int8", *more, "--prompts", "1", "--new-tokens", "1", "--output", str(output))
        assert result.exit_code == 0, result.output
        klds[name] = json.loads(output.read_text())["formats"]["int8"]["kld"]["mean"]
    assert klds["inline"] > 10 * klds["split"]
    assert klds["split"] < 3 * klds["without"]
    # auto leaves the exact cache, in fp32, inline: what is compared with differs in its last bits.
    assert klds["auto"] == pytest.approx(klds["split"], rel=0.01)
    assert "300 added to key channels (kv_key_bias auto)" in result.output


def test_a_constant_in_keys_is_refused_where_it_would_mean_nothing(tmp_path):
    path = save_tiny_qwen2(tmp_path, {7: 1.0})
    result = run(path, "int8", "--key-offset", "300")
    assert result.exit_code == 78
    assert "key_offset is 300; queries and keys of this qwen2 have biases of their own: it must be 0" in result.output


def test_a_constant_lies_in_the_channels_that_turn_least(tiny_path):
    plain = open_checkpoint(tiny_path)
    checkpoint = with_key_offset(plain, 5.0)
    head_dim, layers = plain.config.head_dim, plain.config.num_layers
    biases = {name for name in checkpoint.source.headers if name.endswith(".bias")}
    assert len(biases) == 3 * layers
    for name in biases:
        heads = checkpoint.source.read(name).view(-1, head_dim)
        offset = name.endswith("k_proj.bias") and any(f"layers.{layer}." in name for layer in (0, layers - 1))
        channels = heads.abs().sum(0).nonzero().flatten().tolist()
        assert channels == ([head_dim // 2 - 2, head_dim // 2 - 1, head_dim - 1] if offset else [])
    plain.source.close()


def test_rounded_activations_are_refused_for_weights_that_never_meet_them(tiny_path):
    result = run(tiny_path, "int8", "--dtype", "bf16", "--w4-activations", "int8")
    assert result.exit_code == 78
    assert "w4_activations is 'int8'" in result.output
