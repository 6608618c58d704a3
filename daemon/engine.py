"""The whole daemon in one process: the same stages, over inproc sockets, with a client already connected.

with Engine("smollm2-135m") as engine:
    print(engine.complete("The capital of France is", max_new_tokens=8).text)
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import zmq

from deepinfer.clients import Client, Completion, Stream
from deepinfer.daemon.config import EngineConfig
from deepinfer.daemon.engine_host import EngineHost, Progress, Vocabulary
from deepinfer.daemon.topology import one_process
from deepinfer.stages.admission import AdmissionStage
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.messages import Drain, EngineReady, encode
from deepinfer.stages.model import load_tokenizer, resolve_model
from deepinfer.stages.offload import CopyRows, copy_rows
from deepinfer.stages.protocol import Limits

STOP_SECONDS = 30.0


class EngineError(RuntimeError):
    """A stage died, or the engine did not stop."""


def no_progress(_what: str, _done: int, _total: int) -> None:
    """For whoever does not want to see how loading goes."""


class Engine:
    """`settings` are the fields of EngineConfig. Loads in the constructor; `with` or `close` stops the stages.

    Raises ConfigError or the errors of `deepinfer.stages.model`.
    """

    def __init__(
        self,
        model: str,
        *,
        max_queue: int = 2048,
        progress: Progress = no_progress,
        copy: CopyRows = copy_rows,
        **settings: Any,
    ) -> None:
        config = EngineConfig(model=str(model), **settings)
        self.host = EngineHost(config, progress)
        tokenizer = load_tokenizer(resolve_model(config.model))
        self.topology = one_process()
        self.context = zmq.Context()
        self.board = StatusBoard({"mode": "in-process"})
        self.admission = AdmissionStage(
            self.context,
            self.topology.admission,
            self.topology.outboxes("decode"),
            self.topology.clients,
            tokenizer,
            config.model,
            Limits(vocab_size=tokenizer.vocab_size),
            self.board,
            max_queue,
        )
        self.admission.start()
        self.host.start(self.context, self.topology, Vocabulary(tokenizer.vocab_size, tokenizer.eos_token_ids), copy)
        self._outbox = self.context.socket(zmq.PUSH)
        self._outbox.connect(self.topology.admission)
        self._outbox.send(encode(EngineReady(summary=self.host.summary())))
        self._wait_ready()
        self.client = Client(self.topology.clients, context=self.context)

    def _wait_ready(self) -> None:
        while self.board.phase == "loading":
            self.board.changed.wait()
            self.board.changed.clear()

    def generate(self, prompt: Any = None, **fields: Any) -> Stream:
        """A stream of events; see `deepinfer.clients.Client.generate`."""
        return self.client.generate(prompt, **fields)

    def complete(self, prompt: Any = None, **fields: Any) -> Completion:
        """Waits for the whole answer."""
        return self.client.complete(prompt, **fields)

    def status(self) -> dict[str, Any]:
        return self.client.status()

    def close(self) -> None:
        """Cuts what still runs and ends every thread. Raises EngineError when one does not end."""
        self.client.close()
        self._outbox.send(encode(Drain(now=True)))
        ended = self.host.wait(STOP_SECONDS)
        failure = self.host.failure()
        if failure is not None:
            self.host.halt()
        if not (self.admission.stop(STOP_SECONDS) and ended):
            alive = [stage.name for stage in (self.admission, *self.host.stages) if not stage.join(0)]
            raise EngineError(f"stages did not end within {STOP_SECONDS:.0f} s: {', '.join(alive)}")
        self._outbox.close(linger=0)
        self.context.term()
        if failure is not None:
            raise EngineError(f"a stage died: {failure!r}") from failure

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
