"""What the host shim has for a CUDA graph: launches and torch operations, written down once and done again.

As on a GPU, a launch that is captured is not run, numbers are those of the capture, and tensors are addresses. Memory
that the captured code takes is filled with NaN patterns in every replay, so that reading it before it is written shows.
What would end a capture on a GPU (waiting for the device, copies between host and device) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = frozenset(
    f"torch.Tensor.{name}"
    for name in ("cpu", "cuda", "numpy", "tolist", "item", "nonzero", "pin_memory", "__bool__", "__int__", "__float__")
)
_TAKES_MEMORY = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")


class HostGraph:
    """See `kernels.graphs.Graph`."""

    def __init__(self, steps: Sequence[Callable[[], None]], alive: Any) -> None:
        self._steps = tuple(steps)
        self._alive = alive

    def __len__(self) -> int:
        return len(self._steps)

    def replay(self) -> None:
        for step in self._steps:
            step()


class Recorder:
    """Writes down what this thread does between entering and leaving."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []
        self._alive: list[Any] = []
        self._modes: tuple[Any, ...] = (_Refusals(), _Operations(self))

    def __enter__(self) -> Recorder:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def keep(self, step: Callable[[], None], used: Any) -> None:
        """`step` is done at this place of every replay; `used` lives as long as the graph."""
        self._steps.append(step)
        self._alive.append(used)

    def graph(self) -> HostGraph:
        return HostGraph(self._steps, self._alive)


class _Refusals(TorchFunctionMode):
    """Refuses what would end a capture on a GPU."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = resolve_name(func) or getattr(func, "__name__", "")
        moves = name == "torch.Tensor.to" and any(
            isinstance(value, str | torch.device) for value in tree_leaves((args[1:], kwargs))
        )
        if name in _WAITS or moves or name == "torch.tensor":
            raise RuntimeError(f"{name} inside a captured step: it waits for the device or copies to or from the host")
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Does torch's operations, and writes them down."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        storages = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [tensor.untyped_storage().data_ptr() not in storages for tensor in made]
        schema = func._schema

        def replay() -> None:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for kept, new, own in zip(made, again, fresh, strict=True):
                if own:
                    kept.copy_(new)

        if schema.name in _TAKES_MEMORY:
            self._recorder.keep(lambda: _poison(made), made)
        elif schema.is_mutable or any(fresh):
            self._recorder.keep(replay, (args, kwargs, made))
        return result


def _poison(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(0xFF) if tensor.is_contiguous() and tensor.dim() else tensor.zero_()
