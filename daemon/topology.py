"""Every address of the daemon, and who binds it. A stage is told its addresses and knows no others."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from deepinfer.daemon.config import ConfigError

MAX_IPC_PATH = 107
"""Bytes of a Unix socket path on Linux; longer ones fail at bind with an error that does not say so."""

_serial = itertools.count()


@dataclass(frozen=True)
class Topology:
    """
    | address    | socket bound there | bound by  | written to by              |
    |------------|--------------------|-----------|----------------------------|
    | clients    | ROUTER             | admission | clients                    |
    | control    | ROUTER             | control   | the CLI                    |
    | metrics    | XPUB               | publisher | subscribers, to subscribe  |
    | front      | PULL               | admission | the front's main thread    |
    | admission  | PULL               | admission | decode, engine host        |
    | decode     | PULL               | decode    | admission, prefill, offload |
    | prefill    | PULL               | prefill   | decode                     |
    | offload    | PULL               | offload   | decode                     |

    `admission` and `decode` are those of one engine process. The next one gets others, so nothing that a dead engine
    sent is ever taken for a message of the one that lives, and nothing meant for the dead one reaches the other.
    """

    clients: str
    control: str
    metrics: str
    front: str
    admission: str
    decode: str
    prefill: str
    offload: str

    def outboxes(self, *stages: str) -> dict[str, str]:
        return {stage: getattr(self, stage) for stage in stages}


def two_processes(folder: Path, clients: str | None = None, generation: int = 0) -> Topology:
    """ipc between the front and the engine, inproc inside the engine. `folder` is private to this daemon; `generation`
    counts its engines.

    Raises ConfigError when a socket path would be too long or is no text.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"runtime_dir is {str(folder)!r}; its name must be UTF-8") from None

    def ipc(name: str) -> str:
        path = folder / f"{name}.sock"
        if len(os.fsencode(path)) > MAX_IPC_PATH:
            raise ConfigError(
                f"runtime_dir: the socket path {path} has {len(os.fsencode(path))} bytes; a Unix socket path has at "
                f"most {MAX_IPC_PATH}. Choose a shorter runtime folder."
            )
        return f"ipc://{path}"

    return Topology(
        clients=clients or ipc("clients"),
        control=ipc("control"),
        metrics=ipc("metrics"),
        front=ipc("front"),
        admission=ipc(f"admission-{generation:05d}"),
        decode=ipc(f"decode-{generation:05d}"),
        prefill="inproc://prefill",
        offload="inproc://offload",
    )


def one_process() -> Topology:
    """Everything over inproc, in one zmq context: tests and the in-process engine. Each call gives fresh names."""
    serial = next(_serial)
    names = ("clients", "control", "metrics", "front", "admission", "decode", "prefill", "offload")
    return Topology(*(f"inproc://{name}-{serial}" for name in names))
