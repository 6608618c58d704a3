"""One line on a terminal in place of the three that `huggingface_hub` shows of a fetch and leaves open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_BYTES_WRITTEN = "huggingface_hub.snapshot_download"
"""What the library calls the bar that is shown. The others count files, and bytes before they are unpacked."""
_FORMAT = "fetching {percentage:3.0f}% {bar:20} {n_fmt} of {total_fmt}, {remaining} left{postfix}"


@contextmanager
def one_line() -> Iterator[type[Any]]:
    """Gives a class for its `tqdm_class`. The line is gone at the end, so that what is printed next has one of its own.
    Nothing is shown elsewhere than on a terminal, and where the library's settings say so."""
    from huggingface_hub.utils import tqdm

    bars: list[Any] = []

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            shown = settings.get("name") == _BYTES_WRITTEN
            changed = {"bar_format": _FORMAT, "leave": False} if shown else {"disable": True}
            super().__init__(*arguments, **{**settings, **changed})
            bars.append(self)

    try:
        yield Bar
    finally:
        for bar in bars:
            bar.close()
