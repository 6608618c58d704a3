"""Models from a hub, through huggingface_hub and real HTTP: what is fetched, resumed, refused, found again offline."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_hub import FakeHub, Repo, serving

from deepinfer.daemon.cli import main
from deepinfer.stages.model import ModelNotFoundError, hub, open_checkpoint, resolve_model

GGUF = b"GGUF" + bytes(5000)
NEEDED = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
COMMIT, OLDER = "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "wheels"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def server(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    folder = {path.name: path.read_bytes() for path in tiny_path.iterdir()}
    more = {"README.md": b"#", "pytorch_model.bin": b"\x80", "onnx/model.onnx": b"o", "modeling_own.py": b"raise"}
    repos = {
        "org/tiny": Repo({**folder, **more}, {"main": COMMIT, "v1": OLDER}),
        "org/quants": Repo({f"m-{kind}.gguf": GGUF for kind in ("Q4_K_M", "Q8_0", "Q4_0")} | {"mmproj-m.gguf": GGUF}),
        "org/single": Repo({"only.gguf": GGUF, "README.md": b"#"}),
        "org/split": Repo({f"q4/m-Q4_0-0000{n}-of-00002.gguf": GGUF for n in (1, 2)} | {"m-F16.gguf": GGUF}),
        "org/pickled": Repo({"config.json": b"{}", "pytorch_model.bin": b"\x80"}),
        "org/private": Repo(folder, token="let-me-in"),
        "org/gated": Repo(folder, token="let-me-in", gated=True),
    }
    with serving(repos) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running


def cut_off(monkeypatch: pytest.MonkeyPatch) -> str:
    """From now on nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    return endpoint


def test_only_the_files_that_make_a_model_are_fetched_and_then_no_hub_is_asked(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model("org/tiny")
    assert {path.name for path in folder.iterdir()} - {"chat_template.jinja"} == NEEDED
    open_checkpoint(folder).source.close()
    asked = len(server.asked)
    assert resolve_model("org/tiny") == folder
    assert len(server.asked) == asked
    cut_off(monkeypatch)
    assert resolve_model("org/tiny") == folder


def test_a_cut_download_goes_on_where_it_ended(
    server: FakeHub, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    server.cut_after["model.safetensors"] = 3000
    name = hub.parse("org/tiny")
    assert name is not None
    try:
        fetched = hub.fetch(name)
    except ModelNotFoundError:  # Where the library itself does not try again.
        assert hub.cached(name) is None
        fetched = hub.fetch(name)
    assert (fetched.path / "model.safetensors").read_bytes() == (tiny_path / "model.safetensors").read_bytes()
    first, second = server.downloads("model.safetensors")
    assert first in (None, "bytes=0-")
    assert second is not None
    assert 0 < int(second.removeprefix("bytes=").split("-")[0]) <= 3000


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"], ids=["large", "small"])
def test_a_file_with_another_checksum_is_refused_and_fetched_anew(file: str, server: FakeHub) -> None:
    right = server.repos["org/tiny"].files[file]
    server.changed[file] = right[:-1] + bytes([right[-1] ^ 1])
    with pytest.raises(ModelNotFoundError, match=rf"org/tiny: {file} came with checksum \w+.*it was removed"):
        resolve_model("org/tiny")
    server.changed.clear()
    assert (resolve_model("org/tiny") / file).read_bytes() == right


def test_a_revision_is_a_model_of_its_own(server: FakeHub) -> None:
    newest, older = resolve_model("org/tiny"), resolve_model("org/tiny@v1")
    assert (newest.name, older.name) == (COMMIT, OLDER)
    assert resolve_model(f"org/tiny@{OLDER}") == older


@pytest.mark.parametrize(
    ("name", "file"),
    {
        "org/quants:Q8_0": "m-Q8_0.gguf",
        "org/quants:q4_k_m": "m-Q4_K_M.gguf",
        "org/quants:m-Q4_0.gguf": "m-Q4_0.gguf",
        "org/quants/m-Q4_0.gguf": "m-Q4_0.gguf",
        "org/single": "only.gguf",
        "org/split:Q4_0": "q4/m-Q4_0-00001-of-00002.gguf",
        "org/split:q4/m-Q4_0-00002-of-00002.gguf": "q4/m-Q4_0-00001-of-00002.gguf",
    }.items(),
)
def test_one_gguf_model_is_chosen_by_file_or_quantisation(
    name: str, file: str, server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = resolve_model(name)
    assert path.as_posix().endswith(f"/{COMMIT}/{file}")
    assert len(list(path.parent.rglob("*.gguf"))) == (2 if "split" in name else 1)
    cut_off(monkeypatch)
    assert resolve_model(name) == path


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "org/quants": "org/quants holds several GGUF models; name one, as org/quants:FILE: m-Q4_0.gguf, m-Q4_K_M.gguf",
        "org/quants:Q5_0": r"org/quants holds no GGUF model 'Q5_0'; its GGUF models: m-Q4_0.gguf",
        "org/quants:m": "org/quants holds 3 GGUF models 'm'",
        "org/pickled": r"org/pickled holds no model that loads \(pytorch_model.bin: pickled.*expected config.json",
        "org/nothing": "model org/nothing does not exist at http.*or it is private; no token is set: export HF_TOKEN",
        "org/tiny@v9": "model org/tiny has no revision 'v9'",
        "org/private": "model org/private does not exist at http.*or it is private; no token is set",
        "org/gated": "model org/gated is gated: accept its terms at http.*/org/gated with your account; no token",
    }.items(),
)
def test_a_refusal_says_what_would_help(name: str, words: str, server: FakeHub) -> None:
    with pytest.raises(ModelNotFoundError, match=words):
        resolve_model(name)


def test_a_token_of_the_environment_opens_what_it_may_read(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "wrong")
    for name in ("org/gated", "org/private"):
        with pytest.raises(ModelNotFoundError, match="the token that is set may not read it"):
            resolve_model(name)
    monkeypatch.setenv("HF_TOKEN", "let-me-in")
    for name in ("org/gated", "org/private"):
        open_checkpoint(resolve_model(name)).source.close()


def test_without_a_hub_the_error_says_how_to_get_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = cut_off(monkeypatch)
    with pytest.raises(ModelNotFoundError, match=rf"{endpoint} cannot be reached.*pull org/tiny@v1` once.*lists"):
        resolve_model("org/tiny@v1")
    with pytest.raises(ModelNotFoundError, match=r"org/quants:m-Q4_0\.gguf is not.*pull org/quants:m-Q4_0\.gguf` once"):
        resolve_model("org/quants:m-Q4_0.gguf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set: unset it"):
        resolve_model("org/tiny")


@pytest.mark.parametrize(
    ("name", "repo", "revision", "gguf"),
    [
        ("Q-w.n/Qwen2.5-3B_Instruct.v1", "Q-w.n/Qwen2.5-3B_Instruct.v1", "main", None),
        ("o.r-g/a.b-c:Q4_K_M", "o.r-g/a.b-c", "main", "Q4_K_M"),
        ("o.r-g/a.b-c@v1.5-rc:m.v1-Q4_0.gguf", "o.r-g/a.b-c", "v1.5-rc", "m.v1-Q4_0.gguf"),
        ("o.r-g/a.b-c/sub.dir/m-v1.gguf", "o.r-g/a.b-c", "main", "sub.dir/m-v1.gguf"),
        ("o.r-g/a.b-c.gguf", "o.r-g/a.b-c.gguf", "main", None),
        ("o/n@refs/pr/3", "o/n", "refs/pr/3", None),
    ],
)
def test_names_of_repositories_have_dots_and_dashes(name: str, repo: str, revision: str, gguf: str | None) -> None:
    assert hub.parse(name) == hub.HubId(repo, revision, gguf)


def test_a_fetch_that_lacks_a_shard_is_not_taken_for_a_model(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model("org/tiny")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    cut_off(monkeypatch)
    with pytest.raises(ModelNotFoundError, match="is not in the hub cache"):
        resolve_model("org/tiny")


def test_pull_and_models_are_commands(server: FakeHub, tmp_path: Path) -> None:
    """In processes of their own, which read the environment as a user's do."""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": server.endpoint}
    command = [sys.executable, "-m", "deepinfer.daemon.cli"]
    pulled = subprocess.run(
        [*command, "pull", "org/tiny", "--revision", "v1"], env=environment, capture_output=True, text=True, check=True
    )
    assert f"commit {OLDER[:12]}" in pulled.stdout
    assert (tmp_path / "home" / "hub").is_dir()
    listed = subprocess.run([*command, "models", "--json"], env=environment, capture_output=True, check=True)
    (model,) = [model for model in json.loads(listed.stdout) if model["name"].startswith("org/")]
    assert (model["name"], model["format"], model["supported"]) == ("org/tiny@v1", "safetensors F32", True)
    assert model["revision"] == f"{OLDER[:12]} v1"


def on_a_terminal(command: list[str], environment: Mapping[str, str]) -> str:
    """All that is written to it."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = subprocess.Popen(command, env=dict(environment), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = bytearray()
    with contextlib.suppress(OSError):  # The other side has closed it.
        while chunk := os.read(ours, 4096):
            shown.extend(chunk)
    os.close(ours)
    assert process.wait(60) == 0, shown
    return shown.decode()


def test_on_a_terminal_pull_shows_one_line_that_is_gone_when_it_says_what_it_has(
    server: FakeHub, tmp_path: Path
) -> None:
    """Three lines stay there, and are written over, when `huggingface_hub` shows its own."""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": server.endpoint}
    shown = on_a_terminal([sys.executable, "-m", "deepinfer.daemon.cli", "pull", "org/tiny"], environment)
    line, where, end = shown.split("\n")
    *bars, blank, said = line.strip("\r").split("\r")
    assert bars
    assert all(bar.startswith("fetching ") for bar in bars)
    assert not blank.strip()
    assert said.startswith("org/tiny: ")
    assert where.strip() == str(next(tmp_path.glob("home/hub/models--org--tiny/snapshots/*")))
    assert end == ""


def test_models_says_what_is_here_and_why_something_does_not_load(server: FakeHub) -> None:
    resolve_model("org/tiny")
    resolve_model("org/quants:Q8_0")
    found = {model["name"]: model for model in json.loads(CliRunner().invoke(main, ["models", "--json"]).stdout)}
    assert found["org/tiny"]["nbytes"] == sum(len(server.repos["org/tiny"].files[name]) for name in NEEDED) + len(
        server.repos["org/tiny"].files["chat_template.jinja"]
    )
    assert found["org/quants:m-Q8_0.gguf"]["supported"] is False
    assert "m-Q8_0.gguf" in found["org/quants:m-Q8_0.gguf"]["reason"]
    shown = CliRunner().invoke(main, ["models"]).stdout
    assert "org/tiny" in shown
    assert "org/quants:m-Q8_0.gguf" in shown


def test_pull_refuses_what_is_no_model_of_a_hub(tiny_path: Path) -> None:
    for name, words in ((str(tiny_path), "is a path on this machine"), ("no model", "is no hub id")):
        result = CliRunner().invoke(main, ["pull", name])
        assert result.exit_code == 78
        assert words in result.output
