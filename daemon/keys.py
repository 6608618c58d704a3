"""CURVE keys on disk: the daemon's own pair, and the public keys of the clients that it lets in."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth
from zmq.utils import z85

from deepinfer.daemon.runtime_folder import FolderError, make_private, require_private
from deepinfer.daemon.setting import ConfigError
from deepinfer.stages.curve import Curve

SERVER = "server"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class KeyFiles(NamedTuple):
    """The two files of a pair, in the format of zmq.auth."""

    public: Path
    secret: Path


class KeyStore:
    """A private folder (0700): `server.key` and `server.key_secret`, and `allowed/NAME.key` for each client. Every
    method raises ConfigError for a folder or a file that cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._allowed = folder / "allowed"

    def new_server(self) -> KeyFiles:
        _make(self.folder)
        return new_pair(self.folder, SERVER)

    def server(self) -> Curve | None:
        """None when there are no keys yet."""
        _require(self.folder)
        path = self.folder / f"{SERVER}.key_secret"
        if not path.exists():
            return None
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"keys_dir: {path} can be read by others; its mode must be 0600")
        public, secret = _load(path)
        if secret is None:
            raise ConfigError(f"keys_dir: {path} holds no secret key")
        return Curve(public, secret)

    def allow(self, name: str, key: bytes) -> None:
        """From now on (after a `reload`, if a daemon runs) the client with this public key is let in."""
        check_name(name)
        _make(self.folder)
        _make(self._allowed)
        path = self._allowed / f"{name}.key"
        if path.exists():
            raise ConfigError(f"{name} is allowed already; revoke it first to give it another key")
        path.write_text(f'curve\n    public-key = "{key.decode()}"\n')
        path.chmod(0o600)

    def revoke(self, name: str) -> None:
        check_name(name)
        try:
            (self._allowed / f"{name}.key").unlink()
        except FileNotFoundError:
            raise ConfigError(f"{name} is not allowed; known: {', '.join(self.allowed()) or 'nobody'}") from None

    def allowed(self) -> dict[str, bytes]:
        """Public keys by the names they were given."""
        _require(self.folder)
        return {path.stem: _load(path)[0] for path in sorted(self._allowed.glob("*.key"))}


def new_pair(folder: Path, name: str) -> KeyFiles:
    """Both files are 0600 and new. Raises ConfigError when there are some."""
    check_name(name)
    files = KeyFiles(folder / f"{name}.key", folder / f"{name}.key_secret")
    for path in files:
        if path.exists():
            raise ConfigError(f"there is {path} already; a key is never written over")
    before = os.umask(0o077)
    try:
        zmq.auth.create_certificates(folder, name)
    except OSError as error:
        raise ConfigError(f"no keys can be written to {folder}: {error.strerror}") from error
    finally:
        os.umask(before)
    return files


def public_key(text: str) -> bytes:
    """From 40 characters of Z85, or from the file of a public key."""
    if _is_key(text.encode()):
        return text.encode()
    path = Path(text)
    if path.is_file():
        return _load(path)[0]
    raise ConfigError(f"{text!r} is neither a public key (40 characters of Z85) nor a file that holds one")


def check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r} is no name for a key: letters, digits, dots, dashes, at most 64 of them")


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a key: {error}") from error
    for key in (public, secret):
        if key is not None and not _is_key(key):
            raise ConfigError(f"{path} holds no CURVE key of 40 characters of Z85")
    return public, secret


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == 40 and len(z85.decode(text)) == 32
    except (KeyError, ValueError):
        return False


def _require(folder: Path) -> None:
    try:
        require_private(folder, "keys_dir")
    except FolderError as error:
        raise ConfigError(str(error)) from error


def _make(folder: Path) -> None:
    try:
        make_private(folder, "keys_dir")
    except FolderError as error:
        raise ConfigError(str(error)) from error
