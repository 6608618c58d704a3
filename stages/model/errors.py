"""What can be wrong with a model, as types that the command line turns into one clear line."""

from __future__ import annotations


class ModelError(Exception):
    """Base: the user can mend it by choosing or repairing a model; nothing here is a fault of the program."""


class ModelNotFoundError(ModelError):
    """The name is neither a path, an alias nor something that could be fetched."""


class UnsupportedModelError(ModelError):
    """The checkpoint is sound but asks for what this engine does not do. Raised before weights are read."""


class CheckpointError(ModelError):
    """A missing, stray, misshapen, doubled or non-finite tensor, a damaged file, a senseless field."""
