"""Packs weights of 4, 8 and 16 bits into the tiles that weight_tiles.h reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_OUTPUTS, TILE_INPUTS = 16, 64
W4_GROUP_SIZES, W8_GROUP_SIZE = (32, 64, 128), 32
DENSE_DTYPES = (torch.bfloat16, torch.float16)
NO_MINIMA, HALF_MINIMA, ZEROS, WIDE = range(4)
"""How 4-bit weights keep their scales and minima: see weight_tiles.h."""
_OUTPUT_MULTIPLE = 2 * TILE_OUTPUTS
_LARGEST_SCALE = 2.0**14


@dataclass(frozen=True)
class WeightTiles:
    """Of 4 bits, by `minima`: w = unit * scale * (code - 8), unit * (scale * code + minimum), unit * scale * (code -
    zero), or scale * code + minimum in fp32. Of 8 bits: w = unit * scale * code. Of 16 bits: w = code, a number of
    `dtype`.

    `codes`: [output tiles, input tiles, bytes of a tile], `scales`: fp16 or fp32 by output tile and group, both in the
    order that weight_tiles.h says. `unit` is a power of two that puts the largest of them near the top of fp16.
    """

    codes: Tensor
    scales: Tensor
    outputs: int
    inputs: int
    bits: int
    group_size: int = TILE_INPUTS
    minima: int = NO_MINIMA
    unit: float = 1.0
    dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def output_tiles(self) -> int:
        return self.codes.shape[0]

    @property
    def input_tiles(self) -> int:
        return self.codes.shape[1]

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        return ("WEIGHT_BITS", self.bits), ("GROUP_SIZE", self.group_size), ("MINIMA", int(self.minima))


def pack_w4(codes: Tensor, scales: Tensor, minima: Tensor, group_size: int, device: str) -> WeightTiles:
    """Pack weights w = scale * code + minimum. Nothing of them is rounded: scales and minima are kept in fp16 where all
    of them are exact in it (GGUF Q4_0, Q4_1), as fp16 scales and zeros where that is exact (AWQ, GPTQ), else in fp32
    (Q4_K).

    Args:
        codes: uint8 [M, K], 0 .. 15. scales, minima: fp32 [M, K / group_size]. Where all minima are -8 * scale (GGUF
            Q4_0, symmetric GPTQ), they are not stored.
        group_size: 32, 64 or 128. device: where the result lies.

    Raises ValueError for shapes that do not fit, and for scales or minima that are not finite.
    """
    if codes.dtype != torch.uint8 or codes.dim() != 2 or int(codes.max()) > 15:
        raise ValueError(f"codes must be uint8 [M, K] from 0 to 15, not {codes.dtype} {tuple(codes.shape)}")
    if group_size not in W4_GROUP_SIZES:
        raise ValueError(f"group_size must be one of {W4_GROUP_SIZES}, not {group_size}")
    kept, parts = _exact_parts(scales, minima)
    stored, unit = _pack_scales(parts, codes.shape, group_size, device, kept)
    # element, pair and upper output are the bits of a nibble's place in its word, from high to low
    low, high = _in_steps(codes.to(device)).permute(0, 1, 2, 3, 6, 4, 5).flatten(4).unflatten(4, (-1, 2)).unbind(-1)
    outputs, inputs = codes.shape
    return WeightTiles(_in_pieces(low | high << 4), stored, outputs, inputs, 4, group_size, kept, unit)


def _exact_parts(scales: Tensor, minima: Tensor) -> tuple[int, tuple[Tensor, ...]]:
    """How they are kept, and what is then stored."""
    if scales.shape != minima.shape or not (torch.isfinite(scales).all() and torch.isfinite(minima).all()):
        return HALF_MINIMA, (scales, minima)  # refused where they are packed
    if torch.equal(minima, -8.0 * scales) and _fits_half(scales, _unit(scales)):
        return NO_MINIMA, (scales,)
    unit = _unit(scales, minima)
    if _fits_half(scales, unit) and _fits_half(minima, unit):
        return HALF_MINIMA, (scales, minima)
    zeros = torch.where(scales != 0, -minima / scales, 0.0)
    zeros = zeros.half().float()
    if _fits_half(scales, _unit(scales)) and torch.equal(-scales * zeros, minima):
        return ZEROS, (scales, zeros)
    return WIDE, (scales, minima)


def _unit(*parts: Tensor) -> float:
    largest = max(float(part.abs().max()) for part in parts)
    return 2.0 ** int(torch.tensor(largest / _LARGEST_SCALE).log2().ceil()) if largest else 1.0


def _fits_half(part: Tensor, unit: float) -> bool:
    return torch.equal((part / unit).half().float() * unit, part)


def pack_w8(codes: Tensor, scales: Tensor, device: str) -> WeightTiles:
    """Pack weights w = scale * code (GGUF Q8_0). codes: int8 [M, K]. scales: fp32 [M, K / 32].

    Raises ValueError for shapes that do not fit, and for scales that are not finite.
    """
    if codes.dtype != torch.int8 or codes.dim() != 2:
        raise ValueError(f"codes must be int8 [M, K], not {codes.dtype} {tuple(codes.shape)}")
    stored, unit = _pack_scales((scales,), codes.shape, W8_GROUP_SIZE, device)
    (outputs, inputs), steps = codes.shape, _in_steps(codes.to(device)).flatten(4)
    return WeightTiles(_in_pieces(steps), stored, outputs, inputs, 8, W8_GROUP_SIZE, unit=unit)


def pack_dense(weight: Tensor, device: str) -> WeightTiles:
    """Pack weights as they are, bf16 or fp16 [M, K]. Raises ValueError for others."""
    if weight.dtype not in DENSE_DTYPES or weight.dim() != 2 or weight.shape[1] % 8:
        raise ValueError(
            f"dense weights must be bf16 or fp16 [M, K], K a multiple of 8, not {weight.dtype} {tuple(weight.shape)}"
        )
    codes = _in_pieces(_in_steps(weight.to(device)).flatten(4))
    outputs, inputs = weight.shape
    return WeightTiles(codes, codes[:0], outputs, inputs, 16, dtype=weight.dtype)


def _in_steps(codes: Tensor) -> Tensor:
    """[M, K] to [output tiles, input tiles, 32 lanes, 4 steps, 2 pairs, upper or lower output, 2 elements]."""
    padded = F.pad(codes, (0, -codes.shape[1] % TILE_INPUTS, 0, -codes.shape[0] % _OUTPUT_MULTIPLE))
    # output = 16 tile + 8 upper + g, input = 64 tile + 32 half + 8 t + 4 step + 2 pair + element
    split = padded.view(len(padded) // TILE_OUTPUTS, 2, 8, -1, 2, 4, 2, 2, 2)
    return split.permute(0, 3, 2, 5, 4, 6, 7, 1, 8).flatten(2, 3).flatten(3, 4)


def _in_pieces(steps: Tensor) -> Tensor:
    """[output tiles, input tiles, 32 lanes, 4 steps, codes] to bytes of tiles, in pieces of 16 bytes for each lane."""
    lanes = steps.contiguous().flatten(3).view(torch.uint8)
    return lanes.unflatten(3, (-1, 16)).transpose(2, 3).flatten(2).contiguous()


def _pack_scales(
    parts: tuple[Tensor, ...], shape: torch.Size, group_size: int, device: str, kept: int = HALF_MINIMA
) -> tuple[Tensor, float]:
    """Scales and perhaps minima or zeros as fp16 or fp32 [output tiles, tiles of groups, 8, groups in a tile, upper or
    lower output, parts], and the unit that scales and minima are counted in."""
    outputs, inputs = shape
    if inputs % group_size:
        raise ValueError(f"groups of {group_size} do not divide {inputs} inputs")
    want = outputs, inputs // group_size
    for part in parts:
        if part.shape != want or not torch.isfinite(part).all():
            raise ValueError(f"scales and minima must be {want} and finite, not {tuple(part.shape)}")
    if kept == WIDE:
        unit, stored = 1.0, torch.stack(parts, -1).to(device)
    else:
        unit = _unit(parts[0]) if kept == ZEROS else _unit(*parts)
        counted = [parts[0] / unit, *(part if kept == ZEROS else part / unit for part in parts[1:])]
        stored = torch.stack(counted, -1).to(device).half()
    groups_in_tile = max(group_size, TILE_INPUTS) // group_size
    padded = F.pad(stored, (0, 0, 0, -stored.shape[1] % groups_in_tile, 0, -outputs % _OUTPUT_MULTIPLE))
    split = padded.view(len(padded) // TILE_OUTPUTS, 2, 8, -1, groups_in_tile, len(parts))
    return split.permute(0, 3, 2, 4, 1, 5).contiguous(), unit
