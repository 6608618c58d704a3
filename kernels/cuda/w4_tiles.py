"""Packs 4-bit weights into the tiles that w4_tiles.h reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_OUTPUTS, TILE_INPUTS = 16, 64
GROUP_SIZES = (32, 64, 128)
_OUTPUT_MULTIPLE = 2 * TILE_OUTPUTS
_LARGEST_SCALE = 2.0**14


@dataclass(frozen=True)
class W4Tiles:
    """w = unit * (scale * code + minimum), or without minima unit * scale * (code - 8).

    `codes`: int32 [output tiles, input tiles, 32 lanes, 4 words]. `scales`: fp16, by output tile and group, in the
    order that w4_tiles.h says. `unit` is a power of two that puts the largest scale or minimum near the top of fp16,
    so that rounding to fp16 moves no scale above 2^-28 of the largest by more than 2^-11 of itself.
    """

    codes: Tensor
    scales: Tensor
    unit: float
    outputs: int
    inputs: int
    group_size: int
    has_minima: bool

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def output_tiles(self) -> int:
        return len(self.codes)

    @property
    def input_tiles(self) -> int:
        return self.codes.shape[1]

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        return ("GROUP_SIZE", self.group_size), ("MINIMA", int(self.has_minima))


def pack_tiles(codes: Tensor, scales: Tensor, minima: Tensor, group_size: int, device: str) -> W4Tiles:
    """Pack weights w = scale * code + minimum.

    Args:
        codes: uint8 [M, K], 0 .. 15. scales, minima: fp32 [M, K / group_size]. Where all minima are -8 * scale (GGUF
            Q4_0, symmetric GPTQ), they are not stored.
        group_size: 32, 64 or 128. device: where the result lies.

    Raises ValueError for shapes that do not fit, and for scales or minima that are not finite.
    """
    _check(codes, scales, minima, group_size)
    outputs, inputs = codes.shape
    has_minima = not torch.equal(minima, -8.0 * scales)
    largest = max(float(part.abs().max()) for part in (scales, minima))
    unit = 2.0 ** int(torch.tensor(largest / _LARGEST_SCALE).log2().ceil()) if largest else 1.0
    stored = torch.stack((scales, minima), -1) if has_minima else scales.unsqueeze(-1)
    return W4Tiles(
        _pack_codes(codes.to(device)),
        _pack_scales((stored.to(device) / unit).half(), max(group_size, TILE_INPUTS) // group_size),
        unit,
        outputs,
        inputs,
        group_size,
        has_minima,
    )


def _pack_codes(codes: Tensor) -> Tensor:
    padded = F.pad(codes, (0, -codes.shape[1] % TILE_INPUTS, 0, -codes.shape[0] % _OUTPUT_MULTIPLE))
    # output = 16 tile + 8 upper + g, input = 64 tile + 32 half + 8 t + 4 step + 2 pair + element
    split = padded.view(len(padded) // 16, 2, 8, -1, 2, 4, 2, 2, 2)
    # element, pair and upper are the bits of a nibble's place in its word, from high to low
    nibbles = split.permute(0, 3, 2, 5, 4, 6, 8, 7, 1).reshape(*_tiles(padded), 32, 4, 4, 2)
    low, high = nibbles.unbind(-1)
    return (low | high << 4).view(torch.int32).squeeze(-1).contiguous()


def _pack_scales(stored: Tensor, groups_in_tile: int) -> Tensor:
    """[M, groups, 1 or 2] to [output tiles, tiles of groups, 8, groups in a tile, upper or lower output, 1 or 2]."""
    padded = F.pad(stored, (0, 0, 0, -stored.shape[1] % groups_in_tile, 0, -stored.shape[0] % _OUTPUT_MULTIPLE))
    split = padded.view(len(padded) // 16, 2, 8, -1, groups_in_tile, stored.shape[2])
    return split.permute(0, 3, 2, 4, 1, 5).contiguous()


def _tiles(padded: Tensor) -> tuple[int, int]:
    return padded.shape[0] // TILE_OUTPUTS, padded.shape[1] // TILE_INPUTS


def _check(codes: Tensor, scales: Tensor, minima: Tensor, group_size: int) -> None:
    if codes.dtype != torch.uint8 or codes.dim() != 2 or int(codes.max()) > 15:
        raise ValueError(f"codes must be uint8 [M, K] from 0 to 15, not {codes.dtype} {tuple(codes.shape)}")
    rows, width = codes.shape
    if group_size not in GROUP_SIZES or width % group_size:
        raise ValueError(f"group_size must be one of {GROUP_SIZES} and divide {width}, not {group_size}")
    want = (rows, width // group_size)
    if scales.shape != want or minima.shape != want:
        raise ValueError(f"scales {tuple(scales.shape)} and minima {tuple(minima.shape)} must be {want}")
    if not (torch.isfinite(scales).all() and torch.isfinite(minima).all()):
        raise ValueError("scales and minima must be finite")
