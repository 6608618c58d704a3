"""A small server that speaks what `huggingface_hub` asks of a hub: model info, tree, resolve with ranges and ETags."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 4096
"""Files from this size on are LFS files: their ETag is a SHA-256."""


@dataclass
class Repo:
    files: Mapping[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})
    token: str | None = None
    """Without it the repository is not there for whoever asks."""
    gated: bool = False


@dataclass
class FakeHub:
    repos: dict[str, Repo]
    endpoint: str = ""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, range) of every request."""
    cut_after: dict[str, int] = field(default_factory=dict)
    """File to bytes after which the next answer ends without a word."""
    changed: dict[str, bytes] = field(default_factory=dict)
    """File to what is sent in its place, of the same size."""

    def downloads(self, file: str) -> list[str | None]:
        """Ranges of the requests for the contents of `file`."""
        return [wanted for method, path, wanted in self.asked if method == "GET" and path.endswith(f"/{file}")]


@contextmanager
def serving(repos: dict[str, Repo]) -> Iterator[FakeHub]:
    hub = FakeHub(repos)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Refused(Exception):
    def __init__(self, status: int, code: str):
        super().__init__(code)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        return None

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        try:
            if path.startswith("/api/models/"):
                self._api(path.removeprefix("/api/models/"))
            else:
                self._file(path.lstrip("/"))
        except _Refused as refused:
            self.send_response(refused.status)
            self.send_header("X-Error-Code", refused.code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _repo(self, name: str) -> Repo:
        repo = self.hub.repos.get(name)
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repo is None or (repo.token and not repo.gated and given != repo.token):
            raise _Refused(401 if not given else 404, "RepoNotFound")
        return repo

    def _gate(self, repo: Repo) -> None:
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repo.gated and given != repo.token:
            raise _Refused(403 if given else 401, "GatedRepo")

    def _api(self, rest: str) -> None:
        owner, name, *more = rest.split("/")
        repo = self._repo(f"{owner}/{name}")
        what, revision = (more[0], "/".join(more[1:])) if more else ("revision", "main")
        commit = self._commit(repo, revision)
        files = [{"rfilename": file, **self._stated(content)} for file, content in repo.files.items()]
        if what == "tree":
            body: Any = [
                {"type": "file", "path": file.pop("rfilename"), "oid": file["blobId"], **file} for file in files
            ]
            for file in body:
                if "lfs" in file:
                    file["lfs"] = {"oid": file["lfs"]["sha256"], "size": file["size"], "pointerSize": 134}
        else:
            body = {"id": f"{owner}/{name}", "sha": commit, "siblings": files, "tags": [], "private": False}
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _commit(self, repo: Repo, revision: str) -> str:
        commit = repo.revisions.get(revision, revision if revision in repo.revisions.values() else None)
        if commit is None:
            raise _Refused(404, "RevisionNotFound")
        return commit

    @staticmethod
    def _stated(content: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        stated: dict[str, Any] = {"size": len(content), "blobId": blob}
        if len(content) >= LARGE:
            sha = hashlib.sha256(content).hexdigest()
            stated["lfs"] = {"sha256": sha, "size": len(content), "pointerSize": 134}
        return stated

    def _file(self, rest: str) -> None:
        owner, name, _, revision, file = rest.split("/", 4)
        repo = self._repo(f"{owner}/{name}")
        self._gate(repo)
        commit = self._commit(repo, revision)
        if file not in repo.files:
            raise _Refused(404, "EntryNotFound")
        stated = self._stated(repo.files[file])
        content = self.hub.changed.get(file, repo.files[file])
        first, last = self._range(len(content))
        self.send_response(200 if last is None else 206)
        end = len(content) if last is None else last + 1
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{stated["lfs"]["sha256"] if "lfs" in stated else stated["blobId"]}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - first))
        if last is not None:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.cut_after.pop(file, None)
        if cut is None:
            self.wfile.write(content[first:end])
            return
        self.wfile.write(content[first : first + cut])
        self.wfile.flush()
        time.sleep(0.05)
        self.close_connection = True

    def _range(self, size: int) -> tuple[int, int | None]:
        wanted = self.headers.get("Range")
        if not wanted or not wanted.startswith("bytes="):
            return 0, None
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        return int(first), int(last) if last else size - 1
