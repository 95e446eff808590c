import pytest
import torch
from pages import Pages

from treadle.kernels import registry


@pytest.mark.parametrize("name", ["reference", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_lie_where_attention_reads_them(name: str, dtype: torch.dtype):
    pages = Pages([9, 6], 1, 24, 0, 4, dtype)
    expected = pages.arena.clone()
    k = torch.cat([*pages.keys, pages.keys[0][:1]])[:, 0]
    pages.arena[:] = 0xFF
    seq_ids = torch.tensor([0] * 9 + [1] * 6 + [0], dtype=torch.int32)
    positions = torch.tensor([*range(9), *range(6), -1])
    wider = torch.cat([k, k], 1)[:, :24]  # rows of a wider product
    write = registry.named(f"latent_write.{name}").function
    write(wider, pages.arena, pages.table, seq_ids, positions, pages.layer_offset, 4)
    assert torch.equal(pages.arena, expected)
