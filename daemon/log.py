"""What the processes of a daemon write to standard error: lines for people on a terminal, JSON lines elsewhere."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "human", "json")
HUMAN = "%(asctime)s {process} %(levelname)s %(name)s: %(message)s"
CLEAR_LINE = "\r\x1b[2K"
"""On a terminal: a bar that another process shows there is drawn again, below what is written."""


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, process, logger, message, the `fields` of the record, and exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure_logging(process: str, level: str, format: str) -> None:
    """For the whole process; replaces what was set up before."""
    handler = logging.StreamHandler(sys.stderr)
    terminal = sys.stderr.isatty()
    as_json = format == "json" or (format == "auto" and not terminal)
    before = CLEAR_LINE if terminal and os.environ.get("TERM", "dumb") != "dumb" else ""
    human = logging.Formatter(before + HUMAN.format(process=process))
    handler.setFormatter(JsonFormatter(process) if as_json else human)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)  # A warning of a library is a line of the log like any other.
    for noisy in ("httpx", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())


def for_people(line: str) -> str:
    """A line of a log as a sentence: that of a JSON line, or the line itself."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    if not isinstance(entry, dict) or "message" not in entry:
        return line
    words = " ".join(str(entry[name]) for name in ("time", "process", "level") if name in entry)
    words = f"{words}: {entry['message']}"
    return f"{words}\n{entry['exception']}" if "exception" in entry else words
