"""Checksums of blocks on a GPU are those of the host."""

import numpy as np
import pytest
import torch
from fused_helpers import DEVICE

from megatrain.checkpoint.block_checksums import BLOCKS, CRC32_OF_ZEROS, crc32_of_bits
from megatrain.kernels.fused.block_checksums import partial_checksums


@pytest.mark.parametrize("num_blocks", [1, 5])
def test_checksums_are_those_of_the_host(num_blocks: int) -> None:
    generator = torch.Generator().manual_seed(num_blocks)
    data = torch.randint(0, 256, (num_blocks * BLOCKS.num_bytes,), dtype=torch.uint8, generator=generator)
    data[-1000:] = 0
    words = data.to(DEVICE).view(torch.int64).view(num_blocks, -1)
    bits = torch.from_numpy(crc32_of_bits().view("int32")).to(DEVICE)
    found = partial_checksums(words, bits).cpu().numpy()
    crcs = np.bitwise_xor.reduce(found, axis=1).view(np.uint32) ^ np.uint32(CRC32_OF_ZEROS)
    expected = [BLOCKS.checksum(block) for block in BLOCKS.blocks(data.numpy().data)]
    assert crcs.tolist() == expected
