"""Operators with names: stand-ins for parts of a model that note what tasks a call recorded, or how long it took."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from deepinfer.daemon.bench.profile.costs import Cost, CostOf, attention_cost, linear_cost, tensors_cost
from deepinfer.kernels.attention_batch import AttentionBatch
from deepinfer.kernels.cpu.tasks import recorder
from deepinfer.kernels.kv_formats import BlockLayout
from deepinfer.stages.model import Model


class Mark(NamedTuple):
    """A call that was recorded: it is the steps `first` to `end` - 1 of the recording."""

    operator: str
    first: int
    end: int
    cost: Callable[[AttentionBatch], Cost]


class Call(NamedTuple):
    """A call that was made, with its begin and end in nanoseconds of time.CLOCK_MONOTONIC."""

    operator: str
    begin: int
    end: int
    cost: Cost


def now() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class Notes:
    """Where the stand-ins write. Recorded calls and made ones never mix: one is empty when the other is not."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.marks: list[Mark] = []
        self.calls: list[Call] = []
        self._synchronize = synchronize

    def note(self, operator: str, cost_of: CostOf, function: Callable, args: tuple, kwargs: dict) -> Any:
        taker = recorder()
        if taker is not None:
            first = taker.taken
            result = function(*args, **kwargs)
            self.marks.append(Mark(operator, first, taker.taken, lambda batch: cost_of(args, result, batch)))
            return result
        begin = now()
        result = function(*args, **kwargs)
        self._synchronize()
        end = now()
        batch = next((part for part in args if isinstance(part, AttentionBatch)), None)
        self.calls.append(Call(operator, begin, end, cost_of(args, result, batch)))
        return result

    def take_marks(self) -> list[Mark]:
        taken, self.marks = self.marks, []
        return taken

    def take_calls(self) -> list[Call]:
        taken, self.calls = self.calls, []
        return taken


class Labelled:
    """Does what `target` does. What is called on it is noted: itself as `name`, its methods by their names."""

    def __init__(self, target: Any, name: str, notes: Notes, cost_of: CostOf, prefix: str = "") -> None:
        self._target, self._name, self._notes, self._cost_of, self._prefix = target, name, notes, cost_of, prefix

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._notes.note(self._name, self._cost_of, self._target, args, kwargs)

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._target, attribute)
        if not callable(found):
            return found
        return Labelled(found, self._prefix + attribute, self._notes, self._cost_of)


def labelled_model(model: Model, notes: Notes) -> Model:
    """The same weights; its linear forms and the operators of its device are noted."""
    layers = tuple(dataclasses.replace(layer, **_labelled_linears(layer, notes)) for layer in model.layers)
    head: Any = Labelled(model.head, "head", notes, linear_cost(model.head), "head.")
    ops: Any = Labelled(model.ops, "", notes, tensors_cost)
    return dataclasses.replace(model, layers=layers, head=head, ops=ops)


def _labelled_linears(layer: Any, notes: Notes) -> dict[str, Any]:
    """By field of the layer: whatever has weights and is called with rows."""
    values = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    linears = {name: value for name, value in values.items() if hasattr(value, "step_bytes")}
    return {name: Labelled(value, name, notes, linear_cost(value), f"{name}.") for name, value in linears.items()}


class LabelledAttention:
    """An attention of which only `forward` is noted."""

    def __init__(self, attention: Any, model: Model, layout: BlockLayout, notes: Notes) -> None:
        self._attention, self._notes = attention, notes
        self._cost_of = attention_cost(model.attention_spec(), layout)

    def forward(self, *args: Any) -> None:
        self._notes.note("attention", self._cost_of, self._attention.forward, args, {})

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._attention, attribute)
