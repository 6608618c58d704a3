"""Codes as the words of compressed-tensors `pack-quantized`: the reading side is `stages.model.pack_quantized`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def words(codes: Tensor, bits: int) -> Tensor:
    """uint8 [rows, columns] to int32 [rows, columns * bits / 32 rounded up], the first code lowest; bits 4 or 8."""
    padded = F.pad(codes, (0, -codes.shape[1] % (32 // bits)))
    if bits == 4:
        padded = padded[:, 0::2] | padded[:, 1::2] << 4
    return padded.flatten().view(torch.int32).view(len(codes), -1)


def zero_words(zeros: Tensor, bits: int) -> Tensor:
    """Zero points uint8 [rows, groups] to int32 [rows * bits / 32 rounded up, groups]."""
    return words(zeros.T.contiguous(), bits).T.contiguous()
