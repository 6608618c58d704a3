"""What a process holds when it is ready it holds for good, so garbage is not looked for there."""

from __future__ import annotations

import gc
import logging

logger = logging.getLogger(__name__)


def spare_what_stays() -> None:
    """Once, when the process is ready. A full collection would else walk through every module and the tokenizer. That
    takes tens of milliseconds with the interpreter lock held: a pause of every stream, and of the control socket."""
    gc.freeze()
    logger.debug("%d objects are left out of garbage collections", gc.get_freeze_count())
