"""Where each setting comes from: flags, else the environment, else the configuration file, else the default."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

from deepinfer.daemon.config import DaemonConfig
from deepinfer.daemon.setting import ConfigError, from_text, from_toml, given, nearest, settings_of

PREFIX = "DEEPINFER_"
CONFIG_VARIABLE = "DEEPINFER_CONFIG"
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "DEEPINFER_CONFIG_DIR", "DEEPINFER_RUNTIME_DIR", "DEEPINFER_CACHE_DIR"})
"""Variables of ours that are no settings."""
CONFIG_FILE = "config.toml"
MAX_FILE_BYTES = 1 << 20
"""All settings together need some thousand."""


class Gathered(NamedTuple):
    config: DaemonConfig
    sources: dict[str, str]
    """Of every setting, in words: "flag", "environment NAME", "file PATH" or "default"."""


def config_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """DEEPINFER_CONFIG_DIR, else the service manager's CONFIGURATION_DIRECTORY, else a folder of this user."""
    for variable in ("DEEPINFER_CONFIG_DIR", "CONFIGURATION_DIRECTORY"):
        if environ.get(variable):
            return Path(environ[variable].split(":")[0])
    return platformdirs.user_config_path("deepinfer-daemon")


def gather(flags: Mapping[str, Any], file: Path | None, environ: Mapping[str, str] = os.environ) -> Gathered:
    """`flags` that are None were not given. `file` is that of --config; without it the one in the environment or in the
    configuration folder counts, if it is there. Raises ConfigError."""
    values: dict[str, Any] = {}
    sources = dict.fromkeys(settings_of(DaemonConfig), "default")
    for layer in (_from_file(file, environ), _from_environment(environ), _from_flags(flags)):
        for name, value, source in layer:
            values[name], sources[name] = value, source
    config = DaemonConfig(**values)
    try:
        config.check()
    except ConfigError as error:
        source = sources.get(error.name, "flag")
        raise error if source == "flag" else ConfigError(f"{error} ({source})") from None
    return Gathered(config, sources)


Layer = Iterator[tuple[str, Any, str]]


def _from_flags(flags: Mapping[str, Any]) -> Layer:
    for name, value in given(dict(flags)).items():
        yield name, value, "flag"


def _from_environment(environ: Mapping[str, str]) -> Layer:
    """Every variable with our prefix is a setting, or it is a mistake that would otherwise go unseen."""
    known = settings_of(DaemonConfig)
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in known:
            raise ConfigError(f"the environment variable {variable} is no setting{nearest(name, DaemonConfig)}")
        try:
            yield name, from_text(DaemonConfig, name, text), f"environment {variable}"
        except ConfigError as error:
            raise ConfigError(f"the environment variable {variable}: {error}") from None


def _from_file(file: Path | None, environ: Mapping[str, str]) -> Layer:
    path = _find_file(file, environ)
    if path is None:
        return
    known = settings_of(DaemonConfig)
    for key, value in _read(path).items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: {key} is no setting{nearest(name, DaemonConfig)}")
        try:
            yield name, from_toml(DaemonConfig, name, value), f"file {path}"
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def _find_file(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    if file is not None:
        return file
    if environ.get(CONFIG_VARIABLE):
        return Path(environ[CONFIG_VARIABLE])
    default = config_folder(environ) / CONFIG_FILE
    return default if default.exists() else None


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"the configuration file {path} has more than {MAX_FILE_BYTES} bytes")
        return tomllib.loads(content.decode())
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # Not TOML, or not UTF-8.
        raise ConfigError(f"the configuration file {path} is not valid TOML: {error}") from error
