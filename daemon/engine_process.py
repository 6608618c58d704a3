"""The engine's process: `python -m deepinfer.daemon.engine_process`, started by the front and by nobody else.

Standard input carries the configuration as one line of JSON, then the vocabulary as another, then the log level
whenever it changes. It stays open for as long as the front lives: its end is how the engine learns that it is alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from deepinfer.daemon.config import ConfigError, EngineConfig
from deepinfer.daemon.garbage import spare_what_stays
from deepinfer.daemon.log import configure_logging, set_level
from deepinfer.daemon.second_compiler import SecondCompiler
from deepinfer.daemon.stacks import dump_on_signal
from deepinfer.daemon.start_times import StartTimes, in_words
from deepinfer.daemon.tether import die_with_parent
from deepinfer.daemon.topology import Topology
from deepinfer.daemon.watchdog import Pulses
from deepinfer.kernels.openmp import limit_spinning
from deepinfer.stages.flight_record import FlightRecord
from deepinfer.stages.messages import EngineFailed, EngineReady, Heartbeat, LoadProgress, Message, encode
from deepinfer.stages.model.errors import ModelError

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.05
LAST_WORDS_MS = 30_000
"""Admission may not be listening yet when the engine refuses its settings. If the front is gone, nobody waits."""
HEARTBEAT_SECONDS = 0.25
ORPHANED = 3
"""Exit code when the front went away."""


class FrontLink:
    """The main thread's own PUSH socket to admission, for what happens before and beside the stages. In a context of
    its own, so that `close` can wait until its last words have arrived, whatever state the stages' sockets are in."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
        self._socket.connect(address)
        self._last = 0.0

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def progress(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._last >= PROGRESS_SECONDS:
            self._last = now
            self.send(LoadProgress(what=what, done=done, total=total))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Pulse(threading.Thread):
    """Sends heartbeats from the very start on, so also while the process loads. `of` are the pulses to be told, once
    there are stages."""

    def __init__(self, address: str) -> None:
        super().__init__(name="pulse", daemon=True)
        self._address = address
        self.of: Callable[[], Pulses] = dict

    def run(self) -> None:
        socket = zmq.Context().socket(zmq.PUSH)
        socket.set_hwm(1)
        socket.connect(self._address)
        while True:
            with contextlib.suppress(zmq.Again):  # Admission does not listen yet.
                socket.send(encode(Heartbeat(pulses=self.of())), zmq.DONTWAIT)
            time.sleep(HEARTBEAT_SECONDS)


def start_line(config: EngineConfig, topology: Topology, record: int) -> bytes:
    """`record`: the inherited descriptor of the flight record."""
    payload = {"config": dataclasses.asdict(config), "topology": dataclasses.asdict(topology), "record": record}
    return json.dumps(payload).encode() + b"\n"


def vocabulary_line(num_valid_tokens: int, eos_token_ids: Any) -> bytes:
    return json.dumps({"num_valid_tokens": num_valid_tokens, "eos_token_ids": list(eos_token_ids)}).encode() + b"\n"


def log_level_line(level: str) -> bytes:
    return json.dumps({"log_level": level}).encode() + b"\n"


def main() -> int:
    """Returns the exit code; the caller leaves without waiting for threads, which may be anywhere."""
    # The last one would stop it when it writes to a terminal with `stty tostop`, being in the background there.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    dump_on_signal()
    die_with_parent()
    os.umask(0o077)
    start = json.loads(sys.stdin.buffer.readline())
    config = EngineConfig(**start["config"])
    configure_logging("engine", config.log_level, config.log_format)
    topology = Topology(**start["topology"])
    context = zmq.Context()
    link = FrontLink(topology.admission)
    try:
        _serve(config, topology, context, link, start["record"])
    except (ConfigError, ModelError) as error:
        link.send(EngineFailed(error=str(error), config_error=True))
        return 1
    except Exception as error:  # The top of a process: the front must hear of it.
        logging.exception("the engine died")
        link.send(EngineFailed(error=f"the engine died: {error!r}"))
        return 1
    finally:
        link.close()
    return 0


def _serve(config: EngineConfig, topology: Topology, context: zmq.Context, link: FrontLink, record: int) -> None:
    vocabulary: dict[str, Any] = {}
    arrived = threading.Event()
    threading.Thread(target=_watch_front, args=(vocabulary, arrived), daemon=True).start()
    pulse = Pulse(topology.admission)
    pulse.start()
    limit_spinning()
    second = SecondCompiler(config)
    try:
        second.start()
        link.progress("importing torch", 0, 0)
        times = StartTimes()
        with times.part("imports"):
            from deepinfer.daemon.engine_host import EngineHost, Vocabulary

        host = EngineHost(config, link.progress, times)
        link.progress("compiling kernels", 0, 0)
        with times.part("kernels"):
            host.warm_up()
        second.note_start()
    finally:
        second.end()
    arrived.wait()
    host.start(context, topology, Vocabulary(**vocabulary), record=FlightRecord(record))
    pulse.of = host.pulses
    spare_what_stays()
    summary = host.summary()
    logger.info("loaded: %s", in_words(summary["load"]))
    link.send(EngineReady(summary=summary, pid=os.getpid()))
    host.wait()
    failure = host.failure()
    if failure is not None:
        raise failure
    context.term()


def _watch_front(vocabulary: dict[str, Any], arrived: threading.Event) -> None:
    """What else the front says, then the end of it: whatever the stages are doing, nobody is left to do it for."""
    for line in sys.stdin.buffer:
        told = json.loads(line)
        if "log_level" in told:
            set_level(told["log_level"])
            logger.info("log_level is now %s", told["log_level"])
        else:
            vocabulary.update(told)
            arrived.set()
    os._exit(ORPHANED)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)
