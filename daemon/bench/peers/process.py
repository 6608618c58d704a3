"""A peer's process as the bench sees it: started, asked, stopped while others run, and why it ended."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, cast

import click

DRIVER = Path(__file__).parent / "driver.py"
GONE_SECONDS = 10.0


class PeerFailed(click.ClickException):
    """It did not load, did not answer, or ended. The message is the reason."""


class Run(NamedTuple):
    arrivals: Sequence[Sequence[float]]
    """Of each stream's tokens, in seconds since the job began."""
    first: Sequence[int]
    """Each stream's first token."""


class PeerProcess:
    """Kept for all rounds. Whoever uses it calls `run`; between the calls the process is stopped (SIGSTOP), so that no
    thread of it can wait by spinning while another is measured."""

    def __init__(self, python: str, adapter: Path, options: dict[str, Any], answer_seconds: float) -> None:
        """Waits until the peer is ready. Raises PeerFailed."""
        self._answer_seconds = answer_seconds
        self._stack = ExitStack()
        self._errors = Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / "errors"
        environment = {**os.environ, "OMP_NUM_THREADS": str(options["threads"])}
        environment.pop("PYTHONPATH", None)  # Another Python has packages of its own.
        command = [python, str(DRIVER), str(adapter), json.dumps(options)]
        try:
            with self._errors.open("wb") as errors:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
                )
        except OSError as error:
            self._stack.close()
            raise PeerFailed(f"{python} does not start: {error.strerror}") from error
        self._inlet = cast(IO[str], self._process.stdin)  # Pipes, as asked for above.
        self._outlet = cast(IO[str], self._process.stdout)
        self._answers: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self.facts: dict[str, Any] = self._answer("facts")["facts"]
        except PeerFailed:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Run:
        """Raises PeerFailed; the process has then ended."""
        self._signal(signal.SIGCONT)
        try:
            answer = self._ask({"prompts": prompts, "new_tokens": new_tokens})
        except PeerFailed:
            self._signal(signal.SIGKILL)
            raise
        self._signal(signal.SIGSTOP)
        return Run(answer["arrivals"], answer["first"])

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        try:
            self._inlet.write(json.dumps(job) + "\n")
            self._inlet.flush()
        except BrokenPipeError:
            raise PeerFailed(self._death()) from None
        return self._answer("arrivals")

    def close(self) -> None:
        """End it, whatever state it is in."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._listener.join()
        for pipe in (self._inlet, self._outlet):
            with suppress(BrokenPipeError):  # Of what it will never read.
                pipe.close()
        self._stack.close()

    def _listen(self) -> None:
        for line in self._outlet:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, wanted: str) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=self._answer_seconds)
        except queue.Empty:
            raise PeerFailed(f"no answer within {self._answer_seconds:.0f} s") from None
        if not line:
            raise PeerFailed(self._death())
        answer = json.loads(line)
        if wanted not in answer:
            raise PeerFailed(answer.get("error", f"an answer without {wanted}"))
        return answer

    def _death(self) -> str:
        """How it ended, and the last that it said."""
        try:
            code = self._process.wait(GONE_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its output and did not end"
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return f"{ended}: {lines[-1].strip()}" if lines else ended

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
