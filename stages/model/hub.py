"""Models of the Hugging Face hub: found in its cache without the network, or fetched, resumed and checked."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deepinfer.stages.model.errors import ModelNotFoundError
from deepinfer.stages.model.folder_names import CONFIG, INDEX, SINGLE
from deepinfer.stages.model.hub_files import folder_files, gguf_files
from deepinfer.stages.model.hub_progress import one_line

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

_ID = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+?))?(?:[:/](?P<file>[\w./-]+\.gguf)|:(?P<kind>[\w.-]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PIECE = 1 << 20

Checking = Callable[[str, int], None]
"""(file, its bytes), before its checksum is computed."""


class HubId(NamedTuple):
    repo: str
    revision: str
    gguf: str | None
    """File or quantisation."""

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repo}{revision}" + (f":{self.gguf}" if self.gguf else "")


class Fetched(NamedTuple):
    path: Path
    commit: str
    files: int
    nbytes: int


def parse(name: str) -> HubId | None:
    """org/name, org/name@revision, and either with :FILE.gguf (or /FILE.gguf) or a quantisation, as :Q4_K_M."""
    match = _ID.fullmatch(name)
    if match is None or name.startswith((".", "/", "~")):
        return None
    return HubId(match["repo"], match["revision"] or "main", match["file"] or match["kind"])


def cached(hub: HubId) -> Path | None:
    """The model as an earlier fetch left it, if all its files are there. Asks nobody."""
    folder = snapshot_folder(hub)
    if folder is None:
        return None
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    if hub.gguf is None and _is_whole(folder, names):
        return folder
    try:
        parts = [] if hub.gguf is None and folder_files(names) else gguf_files(names, hub.gguf, str(hub))
    except ModelNotFoundError:
        return None
    return folder / parts[0] if parts and names.issuperset(parts) else None


def snapshot_folder(hub: HubId) -> Path | None:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    root = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=hub.repo, repo_type="model")
    reference = root / "refs" / hub.revision
    commit = hub.revision if _COMMIT.fullmatch(hub.revision) else None
    if commit is None and reference.is_file():
        commit = reference.read_text().strip()
    folder = root / "snapshots" / commit if commit else None
    return folder if folder is not None and folder.is_dir() else None


def _is_whole(folder: Path, names: set[str]) -> bool:
    """A fetch that was cut leaves an index whose shards are not all there."""
    if not folder_files(names):
        return False
    if INDEX not in names:
        return SINGLE in names
    try:
        shards = json.loads((folder / INDEX).read_text())["weight_map"].values()
    except (ValueError, KeyError, AttributeError):
        return True  # Whoever opens it says what is wrong with it.
    return names.issuperset(shards)


def fetch(hub: HubId, checking: Checking | None = None) -> Fetched:
    """Fetches what is needed and not there yet, goes on where an earlier fetch was cut, and compares every file with
    the size and checksum that the hub states. Raises ModelNotFoundError that says what to do."""
    from huggingface_hub import HfApi, snapshot_download

    endpoint = os.environ.get("HF_ENDPOINT")
    with _in_words(hub):
        info = HfApi(endpoint=endpoint).model_info(hub.repo, revision=hub.revision, files_metadata=True)
    stated = {sibling.rfilename: sibling for sibling in info.siblings or []}
    names = _needed(hub, stated)
    with _in_words(hub), one_line() as bar:
        folder = Path(
            snapshot_download(
                hub.repo,
                revision=hub.revision,
                allow_patterns=[glob.escape(name) for name in names],
                endpoint=endpoint,
                tqdm_class=bar,
            )
        )
    nbytes = 0
    for name in names:
        nbytes += _check(folder / name, stated[name], hub, checking)
    return Fetched(_found(hub, folder, names), _commit(info), len(names), nbytes)


def _commit(info: ModelInfo) -> str:
    return info.sha or ""


def _found(hub: HubId, folder: Path, names: list[str]) -> Path:
    return folder / names[0] if names[0].lower().endswith(".gguf") else folder


def _needed(hub: HubId, stated: Mapping[str, RepoSibling]) -> list[str]:
    files = folder_files(stated) if hub.gguf is None else []
    if files:
        return files
    if hub.gguf is None and not any(name.lower().endswith(".gguf") for name in stated):
        weights = [name for name in stated if name.endswith((".bin", ".pt", ".pth", ".safetensors"))]
        holds = f" ({', '.join(weights[:3])}: pickled, or of no model folder)" if weights else ""
        raise ModelNotFoundError(
            f"{hub} holds no model that loads{holds}; expected {CONFIG} with {SINGLE} or its shards, or a GGUF file"
        )
    return gguf_files(stated, hub.gguf, hub.repo)


def _check(path: Path, stated: RepoSibling, hub: HubId, checking: Checking | None) -> int:
    """The file's bytes. A file that is not what the hub states is removed, so that the next fetch gets it anew."""
    size = path.stat().st_size
    if checking is not None:
        checking(stated.rfilename, size)
    wanted = stated.lfs.sha256 if stated.lfs is not None else stated.blob_id
    digest = hashlib.sha256() if stated.lfs is not None else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    if wanted is None:
        raise ModelNotFoundError(f"{hub}: the hub states no checksum of {stated.rfilename}, so it cannot be checked")
    if digest.hexdigest() == wanted and stated.size in (None, size):
        return size
    path.resolve().unlink()
    path.unlink(missing_ok=True)
    raise ModelNotFoundError(
        f"{hub}: {stated.rfilename} came with checksum {digest.hexdigest()} and {size} bytes, the hub states {wanted} "
        f"and {stated.size}; it was removed: fetch it again"
    )


@contextmanager
def _in_words(hub: HubId) -> Iterator[None]:
    """What the hub's library raises, as one sentence that says what to do."""
    from huggingface_hub import constants, errors, get_token

    where = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    token = "the token that is set may not read it" if get_token() else "no token is set: export HF_TOKEN=..."
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"model {hub} is gated: accept its terms at {where}/{hub.repo} with your account; {token}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"model {hub.repo} has no revision {hub.revision!r} at {where}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"model {hub.repo} does not exist at {where}, or it is private; {token}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        reason = f"{token}" if status in (401, 403) else "try again later"
        raise ModelNotFoundError(f"model {hub}: {where} answers with status {status}; {reason}") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, errors.HTTPError, ConnectionError) as error:
        raise ModelNotFoundError(_offline(hub, where, error)) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"model {hub}: {error}") from error
    except OSError as error:
        raise ModelNotFoundError(f"model {hub} could not be written to the hub cache: {error}") from error


def _offline(hub: HubId, where: str, error: Exception) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set: unset it to fetch it"
    else:
        why = f"{where} cannot be reached ({type(error).__name__}): connect and `deepinfer-daemon pull {hub}` once"
    return f"model {hub} is not in the hub cache, and {why}; `deepinfer-daemon models` lists what is on this machine"
