"""File names of split GGUF models: NAME-00001-of-00003.gguf and its siblings."""

from __future__ import annotations

import re

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def part_names(name: str) -> list[str] | None:
    """Of all parts, in order, for the name of any of them (folders may be before it); None for another name."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return None
    return [f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in range(1, int(match["count"]) + 1)]
