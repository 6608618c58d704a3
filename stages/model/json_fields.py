"""Typed access to the JSON files of a Hugging Face folder; errors name file and field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer.stages.model.config import MAX_INTEGER
from deepinfer.stages.model.errors import CheckpointError

_REQUIRED = object()
MAX_BYTES = 64 * 2**20
"""Of one JSON file. The index of a model of a hundred thousand tensors has 10 MB."""


class ConfigFields:
    """Typed access to config.json: family defaults for absent fields, errors with file and field."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any], where: str):
        self.raw, self.where = raw, where
        self._defaults = defaults

    def get(self, name: str, default: Any = None) -> Any:
        return self.raw.get(name, self._defaults.get(name, default))

    def integer(self, name: str, default: Any = _REQUIRED, least: int = 1) -> int:
        value = self.get(name, default)
        if value is _REQUIRED:
            raise CheckpointError(f"{self.where}: field {name} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < MAX_INTEGER:
            raise CheckpointError(
                f"{self.where}: {name} is {value!r}, expected an integer of at least {least} and below {MAX_INTEGER}"
            )
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        return positive_number(self.get(name, default), name, self.where)

    def optional_number(self, name: str) -> float:
        """0 where the field is null or absent."""
        return 0.0 if self.get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name} is {value!r}, expected true or false")
        return value


def positive_number(value: Any, name: str, where: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise CheckpointError(f"{where}: {name} is {value!r}, expected a positive number")
    return number


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError when the file is absent, is no JSON or holds no object."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, expected at most {MAX_BYTES}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except ValueError as error:  # Bad syntax, bad UTF-8, or a number of thousands of digits.
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{path} is not valid JSON: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value
