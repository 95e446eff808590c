from __future__ import annotations

import pytest
import torch

from treadle.graph.mxfp4 import VALUES, dequantize_mxfp4, scales_name, unpacked_shape


def test_every_code_with_every_scale():
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | (codes.flip(0) << 4)).expand(3, 1, 16)
    scales = torch.tensor([[127], [125], [130]], dtype=torch.uint8)
    found = dequantize_mxfp4(blocks, scales)
    expected = torch.tensor([each for code in range(16) for each in (VALUES[code], VALUES[15 - code])])
    assert torch.equal(found, torch.stack([expected, expected / 4, expected * 8]))
    assert torch.equal(dequantize_mxfp4(blocks.reshape(3, 16), scales), found), "without a dim of blocks"


def test_it_is_what_transformers_makes_of_the_same_bytes():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 130, (2, 6, 3), dtype=torch.uint8, generator=generator)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    # theirs is transposed for a product from the right
    assert torch.equal(dequantize_mxfp4(blocks, scales), theirs.transpose(1, 2))


def test_names_and_shapes_of_both_spellings():
    assert scales_name("a.gate_up_proj_blocks") == "a.gate_up_proj_scales"
    assert scales_name("a.w1.weight_packed") == "a.w1.weight_scale"
    assert scales_name("a.w1.weight_scale") is None
    assert unpacked_shape("x_blocks", (4, 6, 3, 16)) == (4, 6, 96)
    assert unpacked_shape("x_packed", (6, 48)) == (6, 96)
    with pytest.raises(ValueError, match="16 bytes"):
        unpacked_shape("x_blocks", (4, 6, 3, 8))
    with pytest.raises(ValueError, match="whole blocks of 32"):
        unpacked_shape("x_packed", (6, 40))
