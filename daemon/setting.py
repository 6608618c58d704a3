"""What one setting is: its default, its help, what it may be. Values of every source are read and checked by it."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Any

from deepinfer.stages.protocol_limits import MAX_INTEGER

TRUE_WORDS, FALSE_WORDS = ("true", "1"), ("false", "0")


class ConfigError(ValueError):
    """A setting that cannot work. The message names the setting, its value and what would be right. `name` is that of a
    single setting to blame."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] | None = None,
    *,
    low: float | None = None,
    high: float | None = None,
    aliases: tuple[str, ...] = (),
    live: bool = False,
) -> Any:
    """A field of a configuration dataclass.

    `low` and `high` are allowed themselves. `aliases` are flags by which users of other servers know it. A `live`
    setting is taken over by `reload`; the others need a restart.
    """
    metadata = {"help": help, "choices": choices, "low": low, "high": high, "aliases": aliases, "live": live}
    return dataclasses.field(default=default, metadata=metadata)


def settings_of(config: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(config)}


def kind_of(config: type, name: str) -> type:
    """bool, int, float or str; for `int | None` it is int."""
    hint = typing.get_type_hints(config)[name]
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def from_text(config: type, name: str, text: str) -> Any:
    """The value that a text (of an environment variable, say) means. Raises ConfigError."""
    kind = kind_of(config, name)
    if kind is bool:
        if text.lower() not in TRUE_WORDS + FALSE_WORDS:
            raise ConfigError(f"{name} is {text!r}; it must be true or false")
        return text.lower() in TRUE_WORDS
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; it must be {_WORDS[kind]}") from None


def from_toml(config: type, name: str, value: Any) -> Any:
    """A value that already has a type, if it is the right one. Raises ConfigError."""
    kind = kind_of(config, name)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{name} is {value!r}; it must be {_WORDS[kind]}")
    return value


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def check_values(config: Any) -> None:
    """Raises ConfigError for the first value outside its range or choices. Integers and texts are told to clients, so
    they must be such as every client can hold."""
    for name, field in settings_of(type(config)).items():
        value = getattr(config, name)
        if value is None:
            continue
        low, high, choices = (field.metadata[key] for key in ("low", "high", "choices"))
        if type(value) is int and high is None:
            high = MAX_INTEGER
        if type(value) is str and not _is_plain(value):
            raise ConfigError(f"{name} is {value!r}; it must be UTF-8 text without a NUL", name)
        if low is not None and not value >= low:
            raise ConfigError(f"{name} is {value}; it must be at least {low}", name)
        if high is not None and not value <= high:
            raise ConfigError(f"{name} is {value}; it must be at most {high}", name)
        if choices and value not in choices:
            raise ConfigError(f"{name} is {value!r}; it must be one of: {', '.join(choices)}", name)


def _is_plain(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:  # Bytes of a command line or an environment variable that are no UTF-8.
        return False


def nearest(name: str, config: type) -> str:
    """What somebody may have meant who wrote `name`: ", did you mean X?", or nothing."""
    known = settings_of(config)
    for meant, field in known.items():
        if name in (_plain(alias) for alias in field.metadata["aliases"]):
            return f"; here it is called {meant}"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _plain(alias: str) -> str:
    return alias.split("/")[0].removeprefix("--").replace("-", "_")


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Those that somebody set: a flag that is absent is None."""
    return {name: value for name, value in values.items() if value is not None}


def numbers_of(config: Any, name: str, kind: type) -> list:
    """The values of a setting that is a list in text, such as "1,2,4". Raises ConfigError."""
    value = getattr(config, name)
    try:
        return [kind(part) for part in value.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name} is {value!r}; it must be numbers separated by commas", name) from error
