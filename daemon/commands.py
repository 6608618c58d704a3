"""The commands that talk to a running daemon. They import neither torch nor transformers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import msgpack
import psutil
import zmq
from rich.table import Table

from deepinfer.clients.discovery import Connection, read_connection
from deepinfer.clients.errors import NoDaemonError
from deepinfer.clients.keys import use_keys
from deepinfer.daemon.runtime_folder import CONNECTION_FILE, is_locked
from deepinfer.daemon.topology import two_processes
from deepinfer.stages.preemption import describe_choice

CONTROL_SECONDS = 3.0
POLL_SECONDS = 0.05
STOP_SECONDS = 30.0
"""What a daemon may take to end besides the time that it gives to running requests."""
EXIT_READY, EXIT_DEAD, EXIT_FAILED, EXIT_NOT_RUNNING, EXIT_HUNG = 0, 1, 2, 3, 4


class NoDaemon(RuntimeError):
    """`code` is the exit code that says why."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def connection(folder: Path) -> Connection:
    """The connection file of a living daemon. Raises NoDaemon."""
    file = folder / CONNECTION_FILE
    alive = is_locked(folder)
    if not file.exists():
        if alive:
            raise NoDaemon(f"the daemon in {folder} is starting or stopping", EXIT_NOT_RUNNING)
        raise NoDaemon(f"no daemon is running in {folder}; start one with: deepinfer-daemon start", EXIT_NOT_RUNNING)
    if not alive:
        raise NoDaemon(f"the daemon in {folder} died and left its files; a new start cleans them up", EXIT_DEAD)
    try:
        return read_connection(file)
    except NoDaemonError as error:
        raise NoDaemon(str(error), EXIT_FAILED) from error


def control(where: Path | Connection, op: str, **fields: Any) -> dict[str, Any]:
    """One call to the control socket, which answers from early in the start on: that of a runtime folder, or of a
    daemon elsewhere. Raises NoDaemon."""
    if isinstance(where, Path):
        if not is_locked(where):
            connection(where)
        where = Connection(two_processes(where).control)
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        if where.curve is not None:
            use_keys(socket, where.curve)
        socket.connect(where.endpoint)
        socket.send(msgpack.packb({"v": 1, "op": op, **fields}))
        if not socket.poll(int(CONTROL_SECONDS * 1000)):
            raise NoDaemon(f"the daemon at {where.endpoint} does not answer", EXIT_HUNG)
        raw = socket.recv()
    finally:
        socket.close()
        context.term()
    return _data_of(raw, where.endpoint)


def _data_of(raw: bytes, endpoint: str) -> dict[str, Any]:
    """What an answer says. Raises NoDaemon for an error, and for what no daemon sends."""
    try:
        answer = msgpack.unpackb(raw)
        if answer["event"] == "error":
            raise NoDaemon(answer["message"], EXIT_FAILED)
        return answer["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise NoDaemon(f"what answers at {endpoint} is no daemon of ours: {error!r}", EXIT_FAILED) from error


def show_status(where: Path | Connection, as_json: bool, wait: int | None = None) -> int:
    try:
        status = control(where, "status") if wait is None else _wait_ready(where, wait)
    except NoDaemon as error:
        click.echo(json.dumps({"phase": "none", "error": str(error)}) if as_json else str(error))
        return error.code
    code = {"hung": EXIT_HUNG, "ready": EXIT_READY}.get(status["phase"], EXIT_NOT_RUNNING)
    if as_json or not status["engine"]:
        click.echo(json.dumps(status, indent=1) if as_json else f"phase: {status['phase']}")
        return code
    from deepinfer.daemon.display import summary_rows, wide_console

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in [("phase", _phase(status)), *summary_rows(status), *_live_rows(status)]:
        table.add_row(name, value)
    wide_console().print(table, highlight=False)
    return code


def _wait_ready(where: Path | Connection, seconds: int) -> dict[str, Any]:
    """The status when it is ready, or after `seconds`. A daemon that is not there yet may come. Raises NoDaemon."""
    give_up = time.monotonic() + seconds
    while True:
        try:
            status = control(where, "status")
            if status["phase"] == "ready" or time.monotonic() > give_up:
                return status
        except NoDaemon:
            if time.monotonic() > give_up:
                raise
        time.sleep(POLL_SECONDS)


def _phase(status: dict[str, Any]) -> str:
    phase = status["phase"]
    return f"{phase}: {status['hung']} has work and does not move" if phase == "hung" else phase


def _live_rows(status: dict[str, Any]) -> list[tuple[str, str]]:
    if not status["blocks"]["total"]:
        return []  # The engine has not told of itself yet.
    blocks, offload, counters = status["blocks"], status["cpu_offload"], status["counters"]
    requests = ", ".join(f"{count} {state}" for state, count in status["requests"].items() if count) or "none"
    return [
        ("requests", requests),
        (
            "blocks",
            f"{blocks['free']:,} of {blocks['total']:,} free, {blocks['cached']:,} of them keep prompts for reuse",
        ),
        (
            "host",
            f"{offload['payload_bytes']:,} of {offload['budget_bytes']:,} bytes in use, "
            f"{offload['max_payload_bytes']:,} at most",
        ),
        (
            "swaps",
            f"{counters.get('requests_swapped_total', 0)} out, {counters.get('requests_resumed_total', 0)} in, "
            f"{counters.get('requests_recomputed_total', 0)} recomputed; "
            f"{counters.get('prefetch_hits_total', 0)} came back while others were computed",
        ),
        ("preemption", describe_choice(status["preemption"])),
        ("tokens", f"{counters.get('generation_tokens_total', 0):,} generated"),
    ]


def stop_daemon(folder: Path, now: bool, seconds: int | None = None) -> tuple[int, str]:
    """Exit code, and what became of it in words. `seconds`: how long running requests get, if not as usual."""
    try:
        answer = control(folder, "stop", now=now) if seconds is None else control(folder, "drain", seconds=seconds)
    except NoDaemon as error:
        return error.code, str(error)
    pid, patience = answer["pid"], answer["drain_s"] + STOP_SECONDS
    give_up = time.monotonic() + patience
    while is_locked(folder) or _runs(pid):
        if time.monotonic() > give_up:
            return EXIT_HUNG, f"the daemon (process {pid}) is still there after {patience:.0f} s"
        time.sleep(0.05)
    return EXIT_READY, "stopped"


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
