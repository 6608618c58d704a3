"""Activation-aware scaling (AWQ, arXiv 2306.00978): channels that are active on a text are made larger before rounding.

W x = (W s) (x / s): the columns of a matrix are multiplied with s, and what makes its input is divided by s, so that
the file stays a plain one: the norm before q, k, v and before gate, up, where a family has one there; the rows of v
before o, and of up before down.
The scales are powers of the mean activity of a channel; the power is the one whose rounded matrices err least on inputs
that were kept. Where a head of v serves several of q, its channels share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepinfer.daemon.quantize.calibration import Activity, activities
from deepinfer.daemon.quantize.config import Quantize
from deepinfer.daemon.quantize.matrices import Scaling
from deepinfer.daemon.quantize.plan import Matrix, Plan
from deepinfer.daemon.quantize.report import bar
from deepinfer.daemon.quantize.rounding import to_codes
from deepinfer.daemon.quantize.shards import TORCH_DTYPES
from deepinfer.daemon.quantize.workers import Workers
from deepinfer.kernels.ops import Ops
from deepinfer.stages.model.checkpoint import Checkpoint

POWERS = tuple(step / 10 for step in range(11))
_LEAST = 1e-4


def find_scalings(settings: Quantize, ops: Ops, checkpoint: Checkpoint, plan: Plan) -> dict[str, Scaling]:
    """By name of the result. Raises ConfigError where memory has no room for the source."""
    found: dict[str, Scaling] = {}
    with torch.inference_mode():
        layers = activities(settings, ops, checkpoint)
        with Workers() as workers, bar("searching scales", len(layers)) as advance:
            for number, layer in enumerate(layers):
                _Layer(f"model.layers.{number}", checkpoint, plan, layer, found, workers).search()
                advance(f"layer {number}", 1)
    return found


class _Layer:
    def __init__(
        self,
        prefix: str,
        checkpoint: Checkpoint,
        plan: Plan,
        layer: dict[str, Activity],
        found: dict[str, Scaling],
        workers: Workers,
    ):
        self._prefix, self._config, self._layer, self._found = prefix, checkpoint.config, layer, found
        self._source, self._workers = checkpoint.source, workers
        self._matrices = {matrix.name: matrix for matrix in plan.matrices}
        self._dtype = TORCH_DTYPES[plan.dtype]

    def search(self) -> None:
        config = self._config
        qkv = [f"self_attn.{part}_proj" for part in (["qkv"] if config.fused_projections else "qkv")]
        gate_up = [f"mlp.{part}_proj" for part in (["gate_up"] if config.fused_projections else ["gate", "up"])]
        norms = config.norm_names
        self._after_norm(norms.get("input"), "qkv", qkv)
        self._after_norm(norms.get("mlp"), "gate_up", gate_up)
        self._after_rows(qkv[-1], "o", "self_attn.o_proj", self._shared_by_heads, self._once_a_row)
        self._after_rows(gate_up[-1], "down", "mlp.down_proj", lambda values: values, lambda values: values)

    def _after_norm(self, norm: str | None, form: str, parts: Sequence[str]) -> None:
        """The norm is stored in 16 bits: what that makes of it is taken for what it was divided by. Without a norm the
        residual stream comes in, which nothing scales."""
        if norm is None:
            self._scale_columns(form, parts, torch.ones_like(self._layer[form].mean_abs))
            return
        scales = self._best(form, parts, lambda values: values)
        name = f"{self._prefix}.{norm}.weight"
        offset = self._config.norm_offset
        weight = self._source.read(name).float() + offset
        stored = (weight / scales - offset).to(self._dtype).float() + offset
        usable = torch.isfinite(stored) & (stored != 0)
        scales = torch.where(usable, weight / stored, torch.ones_like(scales))
        self._found[name] = Scaling(rows=1 / scales, offset=offset)
        self._scale_columns(form, parts, scales)

    def _after_rows(
        self,
        before: str,
        form: str,
        part: str,
        spread: Callable[[Tensor], Tensor],
        once: Callable[[Tensor], Tensor],
    ) -> None:
        """The last rows of `before` make the inputs of `part`. `spread` makes a value for each input channel such that
        channels of one row agree, `once` leaves one of them for each row."""
        scales = self._best(form, [part], spread)
        self._scale_columns(form, [part], scales)
        rows = 1 / once(scales)
        others = self._source.headers[f"{self._prefix}.{before}.weight"].shape[0] - len(rows)
        rows = torch.cat((torch.ones(others), rows))
        for kind in ("weight", "bias"):
            name = f"{self._prefix}.{before}.{kind}"
            self._found[name] = self._found.get(name, Scaling())._replace(rows=rows)

    def _scale_columns(self, form: str, parts: Sequence[str], scales: Tensor) -> None:
        importance = self._layer[form].mean_square / scales.square()
        for part in parts:
            name = f"{self._prefix}.{part}.weight"
            self._found[name] = self._found.get(name, Scaling())._replace(columns=scales, importance=importance)

    def _best(self, form: str, parts: Sequence[str], spread: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 [columns]; ones where a matrix is not rounded."""
        activity = self._layer[form]
        mean, inputs = spread(activity.mean_abs).clamp(min=_LEAST), activity.rows.float()
        names = [f"{self._prefix}.{part}.weight" for part in parts]
        if not all(name in self._matrices for name in names):
            return torch.ones_like(mean)
        weights = [(self._matrices[name], self._source.read(name).float()) for name in names]

        def tried(power: float) -> tuple[float, float, Tensor]:
            scales = mean**power
            scales = scales / (scales.max() * scales.min()).sqrt()
            error = sum(_output_error(matrix, weight, scales, inputs) for matrix, weight in weights)
            return error, -power, scales

        return min(self._workers.map(tried, POWERS), key=lambda candidate: candidate[:2])[2]

    def _shared_by_heads(self, values: Tensor) -> Tensor:
        """[q_size], the mean over the heads of q that one head of k and v serves."""
        config = self._config
        heads = values.view(config.num_kv_heads, -1, config.head_dim)
        return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1)

    def _once_a_row(self, scales: Tensor) -> Tensor:
        config = self._config
        return scales.view(config.num_kv_heads, -1, config.head_dim)[:, 0].reshape(-1)


def _output_error(matrix: Matrix, weight: Tensor, scales: Tensor, inputs: Tensor) -> float:
    """Of the outputs for `inputs`, summed over their squares."""
    dtype, total = TORCH_DTYPES[matrix.scale_dtype], 0.0
    step = max(1, (1 << 17) // weight.shape[1])
    for rows in weight.split(step):
        rounded = to_codes(rows * scales, matrix.group, matrix.bits, matrix.symmetric, dtype).dense() / scales
        total += float(((rounded - rows) @ inputs.T).square_().sum(dtype=torch.float64))
    return total
