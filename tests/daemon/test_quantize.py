"""`quantize`: folders that we, compressed-tensors and transformers read alike; what was lost is what is reported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from peak_memory import WATCH
from reference import teacher_forced_logits
from safetensors.torch import load_file, save_file
from tiny import save_tiny_family, save_tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from deepinfer.daemon.cli import main
from deepinfer.daemon.quality.paged import PagedModel
from deepinfer.daemon.quantize import matrices
from deepinfer.daemon.quantize.awq import find_scalings
from deepinfer.daemon.quantize.config import Quantize
from deepinfer.daemon.quantize.divergence import check_memory
from deepinfer.daemon.quantize.files import config_of
from deepinfer.daemon.quantize.plan import make_plan
from deepinfer.daemon.quantize.shards import ShardedWriter, TensorPlan
from deepinfer.daemon.quantize.source import open_source
from deepinfer.daemon.target import Target
from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.ops import CpuOps
from deepinfer.stages.model import UnsupportedModelError, load_model, open_checkpoint
from deepinfer.stages.model.config import RopeConfig
from deepinfer.stages.model.config_hf import config_from_folder
from deepinfer.stages.model.rope import inverse_frequencies

sys.path.append(str(Path(__file__).parents[1] / "stages" / "model"))
from gguf_files import GGUFModelFile
from tiny_checkpoints import save, tiny_model

SHORT = ("--window", "128", "--skip", "16", "--positions", "200", "--device", "cpu", "--threads", "1")
IDS = list(range(1, 60))


def run(*arguments: object, kld: bool = False) -> Result:
    more = SHORT if kld else ("--kld", "off", "--threads", "1")
    return CliRunner().invoke(main, ["quantize", *map(str, arguments), *more])


def quantised(source: Path, folder: Path, *options: str, kld: bool = False) -> dict[str, Any]:
    """The report."""
    result = run(source, folder, *options, "--output", folder.parent / "report.json", kld=kld)
    assert result.exit_code == 0, result.output
    return json.loads((folder.parent / "report.json").read_text())


def our_logits(path: Path) -> torch.Tensor:
    model = load_model(open_checkpoint(path), "fp32")
    paged = PagedModel(model, resolve_kv_format("auto", "fp32"), 128, 64)
    return torch.cat([rows.clone() for rows in paged.logits([*IDS, 0], 0)])


VARIANTS = {
    "asymmetric": ((), "dequantised"),
    "groups of 32, searched": (("--group-size", "32", "--clip", "on"), "dequantised"),
    "a head of 8 bits": (("--head", "int8"), "not at all"),
    "symmetric": (("--symmetric",), "as they are"),
    "symmetric, a head of 8 bits": (("--symmetric", "--head", "int8"), "as they are"),
    "symmetric, a head of 4 bits": (("--symmetric", "--head", "w4", "--group-size", "32"), "as they are"),
}
"""Options, and how the transformers at hand loads such a folder: some versions of compressed-tensors, 0.20 among them,
have no place for packed zero points, and what `dequantize` does has one way of coding for all matrices, in bf16."""


@pytest.mark.parametrize("what", VARIANTS)
def test_compressed_tensors_and_transformers_read_what_we_read(what: str, tmp_path: Path) -> None:
    (options, loads), folder = VARIANTS[what], tmp_path / "result"
    source = tied_copy(tmp_path) if "head" in what else save_tiny_llama(tmp_path / "source")
    quantised(source, folder, *options)
    ours = open_checkpoint(folder).source
    for name, weight in decompressed(folder).items():
        assert torch.equal(ours.read(name), weight), name
    assert AutoTokenizer.from_pretrained(folder).encode("hi") == AutoTokenizer.from_pretrained(source).encode("hi")
    if loads == "as they are":
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        wanted = teacher_forced_logits(theirs, IDS)
        assert float((our_logits(folder) - wanted).norm() / wanted.norm()) < 1e-5
    if loads == "dequantised":
        for name, parameter in dequantised(folder).named_parameters():
            assert torch.equal(parameter, ours.read(name).bfloat16().float()), name


def test_by_itself_it_takes_one_group_size_so_that_transformers_loads_zero_points_of_any_columns(
    tmp_path: Path,
) -> None:
    """`dequantize` reads every matrix by the first config group."""
    sizes = {"hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 12, "num_key_value_heads": 4}
    source = save_tiny_family(tmp_path / "source", "llama", **sizes)
    quantised(source, tmp_path / "mixed", "--group-size", "128")
    assert group_sizes(tmp_path / "mixed") == {64, 128}
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        dequantised(tmp_path / "mixed")
    quantised(source, tmp_path / "result")
    assert group_sizes(tmp_path / "result") == {64}
    theirs, ours = dequantised(tmp_path / "result"), open_checkpoint(tmp_path / "result").source
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours.read(name).bfloat16().float()), name
    wanted = teacher_forced_logits(theirs, IDS)
    assert float((our_logits(tmp_path / "result") - wanted).norm() / wanted.norm()) < 0.05


def group_sizes(folder: Path) -> set[int]:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return {group["weights"]["group_size"] for group in config["config_groups"].values()}


def dequantised(folder: Path) -> Any:
    """By transformers, which rounds weights to bf16 on the way."""
    dense = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=dense)


def tied_copy(path: Path) -> Path:
    """A tiny model whose head is its embedding."""
    folder = save_tiny_llama(path / "source")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, tie_word_embeddings=True)
    return folder


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def decompressed(folder: Path) -> dict[str, torch.Tensor]:
    """Weights by name as the package of the format has them, each by the group that has its bits and group size."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    schemes = [QuantizationScheme.model_validate(group) for group in config["config_groups"].values()]
    found = {}
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        prefix = name.removesuffix(".weight_packed")
        parts = {key.removeprefix(f"{prefix}."): part for key, part in tensors.items() if key.startswith(f"{prefix}.")}
        _, columns = parts["weight_shape"].tolist()
        bits, group = 32 * parts["weight_packed"].shape[1] // columns, columns // parts["weight_scale"].shape[1]
        scheme = next(s for s in schemes if (s.weights.num_bits, s.weights.group_size) == (bits, group))
        parts["weight_scale"] = parts["weight_scale"].float()
        found[f"{prefix}.weight"] = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
    return found


def test_a_gguf_file_becomes_a_folder_of_the_same_model(tmp_path: Path) -> None:
    model = tiny_model("qwen2", head_dim=16)
    path = GGUFModelFile(tmp_path / "m.gguf", model, "qwen2", "Q4_1").write()
    checkpoint = open_source(path)
    assert config_of(checkpoint.config, "here")["attention_bias"] is False
    (tmp_path / "config.json").write_text(json.dumps(config_of(checkpoint.config, "here")))
    assert config_from_folder(tmp_path) == checkpoint.config


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequencies_of_a_gguf_file_become_the_numbers_that_they_came_from(factor: float, tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    plain = inverse_frequencies(RopeConfig(theta=500000.0), 32)
    stretched = RopeConfig("llama3", 500000.0, factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    divisors = tuple((plain / inverse_frequencies(stretched, 32)).tolist())
    config = config_from_folder(save(tiny_model("llama"), tmp_path))
    read = replace(config, rope=RopeConfig("llama3", 500000.0, frequency_divisors=divisors))
    assert config_of(read, "here")["rope_parameters"] == rope
    other = replace(read, rope=replace(read.rope, frequency_divisors=divisors[::-1]))
    with pytest.raises(UnsupportedModelError, match=r"here: the frequencies of rope_freqs\.weight"):
        config_of(other, "here")


def test_the_report_says_what_each_matrix_lost_and_what_that_does_to_the_text(tiny_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "result"
    report = quantised(tiny_path, folder, "--text", __file__, kld=True)
    before, after = open_checkpoint(tiny_path).source, open_checkpoint(folder).source
    for row in report["matrices"]:
        wanted, got = before.read(row["name"]), after.read(row["name"])
        assert row["relative_l2"] == pytest.approx(float((got - wanted).norm() / wanted.norm()), rel=1e-4)
    losses = [row["relative_l2"] for row in report["matrices"]]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 14
    divergence = report["divergence"]
    assert divergence["positions"] == 200
    assert 0 < divergence["kld"]["mean"] < divergence["kld"]["max"]
    steps = folder_of_steps(tiny_path, tmp_path)
    copied = quantised(steps, tmp_path / "exact", "--symmetric", "--text", __file__, kld=True)
    assert copied["matrices"][0]["relative_l2"] == 0
    assert copied["divergence"]["kld"]["max"] < 1e-6


def folder_of_steps(source: Path, path: Path) -> Path:
    """The model with matrices that four bits hold exactly: steps of -8 to 7 with both ends in every group."""
    folder = Path(shutil.copytree(source, path / "steps"))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        tensors[name] = tensor.bfloat16()
        if "_proj" in name:
            steps = torch.randint(-8, 8, tensor.shape, generator=generator)
            steps[:, ::32] = -8
            tensors[name] = (steps / 64).float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_nothing_is_left_when_a_tensor_cannot_be_quantised(tiny_path: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_path, tmp_path / "source"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    result = run(folder, tmp_path / "result")
    assert result.exit_code == 78
    assert "tensor model.layers.1.mlp.up_proj.weight holds NaN" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_interrupt_leaves_nothing_behind(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, written = tmp_path / "result", []
    quantised(tiny_path, folder)
    before = sorted(path.name for path in folder.iterdir())

    def interrupted(*arguments: Any) -> matrices.MatrixError:
        written.append(list(tmp_path.glob(".result.part-*/*.safetensors")))
        if len(written) == 5:
            raise KeyboardInterrupt
        return matrices.write_matrix(*arguments)

    monkeypatch.setattr("deepinfer.daemon.quantize.run.write_matrix", interrupted)
    assert run(tiny_path, folder, "--force").exit_code == 1
    assert written[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "result"]
    assert sorted(path.name for path in folder.iterdir()) == before
    assert torch.get_num_threads() == 1


def test_weights_must_fit_the_device_and_logits_the_host(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_source(tiny_path)
    weights = checkpoint.estimate_weight_bytes("fp32")
    logits = 4 * 1000 * checkpoint.config.vocab_size
    for gpu, device, host, words in (
        (True, 2 * weights, 2 * logits, ""),
        (True, weights, 2 * logits, "free on a card"),
        (True, 2 * weights, logits, "free on the host"),
        (False, 2 * (weights + logits), 0, ""),
        (False, weights + logits, 0, "free on a card"),
    ):
        target = Target("a card", gpu, gpu, device, device, host)
        monkeypatch.setattr("deepinfer.daemon.quantize.divergence.target_of", lambda ops, found=target: found)
        said = check_memory(Quantize(positions=1000, window=128, skip=16), CpuOps(), checkpoint)
        assert words in said
        assert bool(said) == bool(words)


def test_a_folder_that_is_there_is_replaced_only_when_forced_and_only_if_it_is_a_model(
    tiny_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "result"
    quantised(tiny_path, folder)
    (folder / "old.txt").touch()
    refused = run(tiny_path, folder)
    assert refused.exit_code == 78
    assert "which exists; --force replaces it" in refused.output
    quantised(tiny_path, folder, "--force")
    assert not (folder / "old.txt").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").touch()
    assert "is no model folder; --force replaces nothing else" in run(tiny_path, tmp_path / "mine", "--force").output
    assert "which is the source or holds it" in run(folder, folder, "--force").output
    assert "which is quantised already (compressed-tensors int4)" in run(folder, tmp_path / "again").output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "report.json", "result"]


@pytest.mark.parametrize(("options", "words"), [
    (("--group-size", "48"), "group_size is 48; it must be one of: 128, 64, 32"),
    (("--calibration", "x"), "calibration is 'x', which only --awq reads"),
    (("--kld", "on", "--window", "4096"), "window is 4096; the longest context of this model is 512"),
    (("--window", "128", "--skip", "16", "--positions", "90000"), "positions is 90000; this text has"),
    (("--kld", "on", "--text", "/no/such", "--window", "512"), "text is '/no/such', which cannot be read"),
])  # fmt: skip
def test_an_option_that_cannot_work_is_one_sentence(
    options: tuple[str, ...], words: str, tiny_path: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(main, ["quantize", str(tiny_path), str(tmp_path / "result"), *options])
    assert result.exit_code == 78
    assert words in result.output
    assert list(tmp_path.iterdir()) == []


def test_shards_hold_what_was_planned_and_the_index_names_them(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((3, i + 1), i, dtype=torch.float16 if i % 2 else torch.int64) for i in range(8)}
    names = {torch.float16: "F16", torch.int64: "I64"}
    units = [{name: TensorPlan(names[t.dtype], tuple(t.shape))} for name, t in tensors.items()]
    writer = ShardedWriter(tmp_path, units, 200)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert len(writer.files) > 2
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)
    again = ShardedWriter(tmp_path, units, 200)
    again.write("t0", tensors["t0"])
    with pytest.raises(ValueError, match=r"tensor t1 is torch\.float32"):
        again.write("t1", tensors["t1"].float())
    with pytest.raises(ValueError, match="was planned and not written"):
        again.finish()


MEASURE = f"""{WATCH}
from pathlib import Path
from deepinfer.daemon.quantize.config import Quantize
from deepinfer.daemon.quantize.run import run_quantize

run_quantize(Quantize(kld="off", threads=1), sys.argv[1], Path(sys.argv[3]) / "first", None)
with watched() as grown:
    run_quantize(Quantize(kld="off", threads=1, shard_mib=4), sys.argv[2], Path(sys.argv[3]) / "second", None)
print(len(grown), max(grown))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory as Linux shows it")
def test_memory_is_bounded_by_one_tensor_however_many_shards_there_are(tiny_path: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8}
    source = save(tiny_model("llama", **sizes, head_dim=64), tmp_path / "large", torch.bfloat16, shard="16MB")
    total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    shown = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tiny_path), str(source), str(tmp_path)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    samples, grown = map(int, shown.split()[-2:])
    largest, at_once = 2 * 512 * 1024, matrices.AT_ONCE
    assert len(list(source.glob("*.safetensors"))) > 2
    assert len(list((tmp_path / "second").glob("*.safetensors"))) > 2
    assert samples > 20
    assert grown < 40 * at_once + 2 * largest < total / 6


@pytest.mark.parametrize("family", ["llama", "qwen2", "olmo2", "smollm3", "phi3", "gemma2", "gemma3_text"])
def test_scales_of_channels_leave_a_model_that_is_not_rounded_as_it_was(family: str, tmp_path: Path) -> None:
    source = outliers(save_tiny_family(tmp_path / "source", family))
    settings = Quantize(awq=True, threads=1, device="cpu", calibration=__file__, calibration_tokens=300)
    checkpoint = open_source(source)
    plan = make_plan(checkpoint.source.headers, False, settings)
    scalings = find_scalings(settings, CpuOps(), checkpoint, plan)
    changed = {name.split(".")[-2] for name, scaling in scalings.items()
               if scaling.columns is not None and bool((scaling.columns != 1).any())}  # fmt: skip
    all_of_them = {matrix.name.split(".")[-2] for matrix in plan.matrices}
    assert changed == ({"o_proj", "down_proj"} if family == "olmo2" else all_of_them)
    tensors = load_file(source / "model.safetensors")
    for name, scaling in scalings.items():
        if name in tensors:
            tensors[name] = scaling.apply(tensors[name], slice(None)).contiguous()
            if "norm" in name:  # What the file holds is exactly what the columns undo.
                rounded = tensors[name].to(torch.float16).float(), tensors[name].bfloat16().float()
                slack = 0 if scaling.offset == 0 else 3e-7
                assert any(torch.allclose(tensors[name], each, rtol=1e-6, atol=slack) for each in rounded)
    scaled = Path(shutil.copytree(source, tmp_path / "scaled"))
    save_file(tensors, scaled / "model.safetensors", metadata={"format": "pt"})
    before, after = our_logits(source), our_logits(scaled)
    assert float((after - before).norm() / before.norm()) < 1e-4


def outliers(folder: Path) -> Path:
    """Some channels of every norm far above the others, as large models have them."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensor[::16] *= 12
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_scaling_by_activity_helps_a_model_with_active_channels(tmp_path: Path) -> None:
    source = outliers(save_tiny_llama(tmp_path / "source"))
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + i * 7919 % 89) for i in range(400)))
    plain, scaled = (
        quantised(source, tmp_path / f"result{len(options)}", *options, "--text", str(text), kld=True)
        for options in ((), ("--awq", "--calibration", __file__, "--calibration-tokens", "400"))
    )
    assert scaled["divergence"]["kld"]["mean"] < 0.8 * plain["divergence"]["kld"]["mean"]
