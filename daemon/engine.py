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
from deepinfer.daemon.metrics import Metrics
from deepinfer.daemon.telemetry import CountingTelemetry
from deepinfer.daemon.topology import one_process
from deepinfer.stages.admission import AdmissionStage
from deepinfer.stages.board import StatusBoard
from deepinfer.stages.engine_port import EngineAddresses
from deepinfer.stages.messages import Drain, EngineReady, encode
from deepinfer.stages.model import load_tokenizer, resolve_model
from deepinfer.stages.offload import CopyRows, copy_rows
from deepinfer.stages.protocol import Limits
from deepinfer.stages.stage import Stage

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
        limits: Limits = Limits(),  # noqa: B008 - frozen
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
            self.topology.front,
            EngineAddresses(self.topology.admission, self.topology.decode),
            self.topology.clients,
            tokenizer,
            config.model,
            limits,
            self.board,
            CountingTelemetry(Metrics(self.board)),
        )
        self._outbox = self.context.socket(zmq.PUSH)
        self._closed = False
        try:
            self.admission.start()
            vocabulary = Vocabulary(tokenizer.vocab_size, tokenizer.eos_token_ids)
            self.host.start(self.context, self.topology, vocabulary, copy)
            self._outbox.connect(self.topology.front)
            self._outbox.send(encode(EngineReady(summary=self.host.summary())))
            self._wait_ready()
            self.client = Client(self.topology.clients, context=self.context)
        except BaseException:
            self._end_stages()
            raise

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
        """Cuts what still runs and ends every thread. Idempotent. Raises EngineError when a stage died or hangs."""
        if self._closed:
            return
        self.client.close()
        if self.admission.alive and self.host.failure() is None:
            self._outbox.send(encode(Drain(now=True)))
            self.host.wait(STOP_SECONDS)
        failure = self.admission.failure or self.host.failure()
        self._end_stages()
        if failure is not None:
            raise EngineError(f"a stage died: {failure!r}") from failure

    def _end_stages(self) -> None:
        self._closed = True
        stages: list[Stage] = [*self.host.stages, self.admission]
        alive = [stage.name for stage in stages if not stage.stop(STOP_SECONDS)]
        self._outbox.close(linger=0)
        self.host.close()
        if alive:
            raise EngineError(f"stages did not end within {STOP_SECONDS:.0f} s: {', '.join(alive)}")
        self.context.term()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
