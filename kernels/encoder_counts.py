"""What the encoders of a pool could not store as it was, counted by layer."""

from __future__ import annotations


class EncoderCounts:
    """Base of the attentions that count on the CPU; see `PagedAttention` for what is counted."""

    def __init__(self, num_layers: int) -> None:
        self._saturated = [0] * num_layers
        self._nonfinite = [0] * num_layers

    @property
    def kv_saturated_total(self) -> int:
        return sum(self._saturated)

    @property
    def kv_nonfinite_total(self) -> int:
        return sum(self._nonfinite)

    def kv_counts(self) -> list[tuple[int, int]]:
        return list(zip(self._saturated, self._nonfinite, strict=True))

    def count(self, layer: int, saturated: int, nonfinite: int) -> None:
        """Add the elements of one call of `forward`."""
        self._saturated[layer] += saturated
        self._nonfinite[layer] += nonfinite
