import pytest
import torch
from pages import Pages
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.kernels import registry
from treadle.kernels.latent_write_triton import latent_write


def check(device: str, function, dtype: torch.dtype) -> None:
    pages = Pages([9, 6], 1, 24, 0, 4, dtype)
    expected = pages.arena.clone()
    k = torch.cat([*pages.keys, pages.keys[0][:1]])[:, 0]
    seq_ids = torch.tensor([0] * 9 + [1] * 6 + [0], dtype=torch.int32)
    positions = torch.tensor([*range(9), *range(6), -1])
    arena = torch.full_like(pages.arena, 0xFF).to(device)
    # Rows of a wider product.
    rows = torch.cat([k, k], 1).to(device)[:, :24]
    where = (pages.table, seq_ids, positions, pages.layer_offset)
    function(rows, arena, *(x.to(device) for x in where), 4)
    assert torch.equal(arena.cpu(), expected)


@pytest.mark.parametrize("name", ["reference", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_lie_where_attention_reads_them(name: str, dtype: torch.dtype):
    check("cpu", registry.named(f"latent_write.{name}").function, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_writes_them_there_too(device: str, dtype: torch.dtype):
    check(device, latent_write, dtype)


def test_it_compiles_for_sm_90():
    compiled = compile_for_sm90(
        """
from treadle.kernels.latent_write_triton import latent_write
latent_write(
    torch.zeros(3, 576, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.uint8),
    torch.zeros(2, 5, dtype=torch.int32), torch.zeros(3, dtype=torch.int32),
    torch.zeros(3, dtype=torch.int64), torch.tensor(0), 16, pdl=True,
)
"""
    )
    assert [each["name"] for each in compiled] == ["write_row"]
