"""Where settings come from, which of them counts, and what is said of those that cannot work."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from deepinfer.daemon.cli import main
from deepinfer.daemon.config import ConfigError, DaemonConfig
from deepinfer.daemon.detach import arguments_of
from deepinfer.daemon.setting import kind_of
from deepinfer.daemon.sources import config_folder, gather

NOWHERE = {"DEEPINFER_CONFIG_DIR": "/nowhere"}


def toml_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return path


def test_without_any_source_every_setting_has_the_default_of_the_dataclass():
    config, sources = gather({}, None, NOWHERE)
    assert config == DaemonConfig()
    assert set(sources.values()) == {"default"}


def test_the_first_source_of_flags_environment_file_default_counts(tmp_path):
    """Long random choices of which source has which setting, against the rule written down plainly."""
    rng = random.Random(7)
    names = ["max_queue", "drain_s", "max_running", "max_parks", "prefill_chunk_tokens", "num_blocks"]
    for _ in range(200):
        file, environ, flags = ({n: rng.randint(1, 999) for n in names if rng.random() < 0.4} for _ in range(3))
        path = toml_file(tmp_path, "".join(f"{name} = {value}\n" for name, value in file.items()))
        variables = {f"DEEPINFER_{name.upper()}": str(value) for name, value in environ.items()}
        config, sources = gather(flags, path, variables)
        for name in names:
            if name in flags:
                expected = flags[name], "flag"
            elif name in environ:
                expected = environ[name], f"environment DEEPINFER_{name.upper()}"
            elif name in file:
                expected = file[name], f"file {path}"
            else:
                expected = getattr(DaemonConfig(), name), "default"
            assert (getattr(config, name), sources[name]) == expected


def test_the_file_of_the_configuration_folder_is_read_when_no_other_is_named(tmp_path):
    (tmp_path / "config.toml").write_text("max_queue = 5\n")
    other = toml_file(tmp_path, "max_queue = 6\n")
    folder = {"DEEPINFER_CONFIG_DIR": str(tmp_path)}
    assert gather({}, None, folder).config.max_queue == 5
    assert gather({}, None, {**folder, "DEEPINFER_CONFIG": str(other)}).config.max_queue == 6
    assert gather({}, other, {**folder, "DEEPINFER_CONFIG": "/nowhere"}).config.max_queue == 6
    assert config_folder({"CONFIGURATION_DIRECTORY": "/a:/b"}) == Path("/a")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_quue = 5", ["max_quue is no setting", "did you mean max_queue?"]),
        ("mem_fraction_static = 0.5", ["here it is called gpu_memory_fraction"]),
        ("gpu_memory_fraction = 1.5", ["gpu_memory_fraction is 1.5", "at most 1.0", "settings.toml"]),
        ("gpu_memory_fraction = nan", ["gpu_memory_fraction is nan"]),
        ("max-total-tokens = 5", ["here it is called max_cache"]),
        ("zzz = 5", ["zzz is no setting"]),
        ("max_queue = 'five'", ["max_queue is 'five'", "an integer"]),
        ("max_queue = true", ["max_queue is True", "an integer"]),
        ("max_queue = 5.0", ["max_queue is 5.0", "an integer"]),
        ("max_queue = [5]", ["max_queue is [5]", "an integer"]),
        ("model = 5", ["model is 5", "a text"]),
        ("prefix_cache = 1", ["prefix_cache is 1", "true or false"]),
        ("max_queue = 0", ["max_queue is 0", "at least 1", "settings.toml"]),
        ("dtype = 'fp8'", ["dtype is 'fp8'", "auto, fp32, bf16", "settings.toml"]),
        ("[limits]\nmax_queue = 5", ["limits is no setting"]),
        ("max_queue 5", ["not valid TOML"]),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_by_name(tmp_path, text, words):
    with pytest.raises(ConfigError) as refused:
        gather({}, toml_file(tmp_path, text), {})
    for word in [*words, "settings.toml"]:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("DEEPINFER_MAX_QUUE", "5", ["no setting", "did you mean max_queue?"]),
        ("DEEPINFER_MAX_QUEUE", "five", ["'five'", "an integer"]),
        ("DEEPINFER_MAX_QUEUE", "", ["''", "an integer"]),
        ("DEEPINFER_MAX_QUEUE", "-3", ["at least 1"]),
        ("DEEPINFER_PREFIX_CACHE", "perhaps", ["'perhaps'", "true or false"]),
    ],
)
def test_a_variable_that_cannot_be_meant_is_refused_by_name(variable, text, words):
    with pytest.raises(ConfigError) as refused:
        gather({}, None, {**NOWHERE, variable: text})
    for word in [*words, variable]:
        assert word in str(refused.value)


def test_a_file_that_is_named_must_be_there(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read"):
        gather({}, tmp_path / "absent.toml", {})
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        gather({}, binary, {})


def invoke(*arguments: str, **environ: str):
    return CliRunner().invoke(main, arguments, env={**NOWHERE, **environ})


def test_config_show_prints_values_and_sources(tmp_path):
    path = toml_file(tmp_path, "drain_s = 7\nprefix_cache = false\n")
    arguments = ["config", "show", "--config", str(path), "--max-queue", "9"]
    shown = invoke(*arguments, "--json", DEEPINFER_MAX_PARKS="3")
    assert shown.exit_code == 0, shown.output
    values = json.loads(shown.output)
    assert list(values) == [field.name for field in fields(DaemonConfig)]
    assert values["drain_s"] == {"value": 7, "source": f"file {path}"}
    assert values["prefix_cache"] == {"value": False, "source": f"file {path}"}
    assert values["max_queue"] == {"value": 9, "source": "flag"}
    assert values["max_parks"] == {"value": 3, "source": "environment DEEPINFER_MAX_PARKS"}
    assert values["model"] == {"value": DaemonConfig().model, "source": "default"}
    table = invoke(*arguments).output
    assert all(field.name in table for field in fields(DaemonConfig))
    assert invoke("config", "show", DEEPINFER_MAX_QUUE="1").exit_code == 78


@pytest.mark.parametrize(
    ("alias", "text", "name", "value"),
    [
        ("--model-path", "m", "model", "m"),
        ("--context-length", "99", "max_context", 99),
        ("--max-model-len", "99", "max_context", 99),
        ("--max-total-tokens", "99", "max_cache", 99),
        ("--chunked-prefill-size", "99", "prefill_chunk_tokens", 99),
        ("--max-num-batched-tokens", "99", "prefill_chunk_tokens", 99),
        ("--max-running-requests", "9", "max_running", 9),
        ("--max-num-seqs", "9", "max_running", 9),
        ("--max-queued-requests", "9", "max_queue", 9),
        ("--num-gpu-blocks-override", "9", "num_blocks", 9),
        ("--page-size", "32", "block_size", 32),
        ("--mem-fraction-static", "0.5", "gpu_memory_fraction", 0.5),
        ("--gpu-memory-utilization", "0.5", "gpu_memory_fraction", 0.5),
        ("--attention-backend", "reference", "attention", "reference"),
        ("--disable-radix-cache", None, "prefix_cache", False),
        ("--enable-prefix-caching", None, "prefix_cache", True),
    ],
)
def test_flags_of_other_servers_are_understood(alias, text, name, value):
    shown = invoke("config", "show", "--json", alias, *([] if text is None else [text]))
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)[name] == {"value": value, "source": "flag"}


def test_a_detached_start_is_given_the_same_flags_again():
    """So that its other settings keep their sources."""
    rng = random.Random(3)
    samples = {int: 5000, float: 0.5, str: "tcp://127.0.0.1:1", bool: False}
    flags = {}
    for field in fields(DaemonConfig):
        choices = field.metadata["choices"] or [samples[kind_of(DaemonConfig, field.name)]]
        flags[field.name] = rng.choice([None, choices[-1]])
    flags |= {"block_size": 32, "num_blocks": None}
    shown = invoke("config", "show", "--json", *arguments_of(flags))
    assert shown.exit_code == 0, shown.output
    for name, entry in json.loads(shown.output).items():
        wanted = flags[name]
        assert entry["source"] == ("default" if wanted is None else "flag")
        assert wanted is None or entry["value"] == wanted
