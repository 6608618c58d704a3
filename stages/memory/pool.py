"""The paged KV pool: one uint8 tensor, a block is a row of it for each group of layers."""

from __future__ import annotations

import torch

from deepinfer.kernels import BlockLayout, KVFormat


class KVPool:
    """`data`: uint8 [num_blocks * groups, row_bytes]; what the bytes of a row mean is the layout's business.

    The tensor belongs to decode. Prefill writes the blocks that a PrefillChunk names, offload copies the rows that a
    SwapOut or SwapIn names, each only while that message is out.
    """

    def __init__(self, num_blocks: int, layout: BlockLayout, kv_format: KVFormat, device: str = "cpu") -> None:
        self.num_blocks = num_blocks
        self.layout = layout
        self.format = kv_format
        self.data = torch.zeros((num_blocks * layout.num_groups, layout.row_bytes), dtype=torch.uint8, device=device)

    @property
    def bytes(self) -> int:
        return self.data.numel()

    @property
    def token_capacity(self) -> int:
        return self.num_blocks * self.layout.block_size
