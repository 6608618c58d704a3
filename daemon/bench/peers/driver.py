"""The process of a peer: loads it through its adapter, then does one job a line. Imports nothing but Python's own
library, and nothing of ours, because it runs in whatever Python the peer is installed in.

Started as `python driver.py ADAPTER OPTIONS`: an adapter's file, and a JSON map for its `load`. Writes {"facts": {...}}
when it is ready; answers {"prompts": [[ids]], "new_tokens": n} with {"arrivals": [[seconds since the start]], "first":
[ids]}; ends with its input. Whatever is raised is said as {"error": ...} before the end.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import IO, Any

PR_SET_PDEATHSIG = 1


def own_output() -> IO[str]:
    """What was standard output. Libraries that print there print to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def adapter_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    if sys.platform == "linux":  # Also when this process is stopped, and cannot read the end of its input.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = own_output()

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    def last_words(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        sys.__excepthook__(kind, error, trace)
        say({"error": f"{kind.__name__}: {error}"})

    sys.excepthook = last_words
    peer = adapter_of(Path(sys.argv[1])).load(**json.loads(sys.argv[2]))
    say({"facts": peer.facts})
    for line in sys.stdin:
        job = json.loads(line)
        arrivals, first = peer.run(job["prompts"], job["new_tokens"])
        say({"arrivals": arrivals, "first": first})


if __name__ == "__main__":
    del sys.path[0]  # This folder: what lies here must not be taken for a library of the peer.
    main()
