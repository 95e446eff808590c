import pytest
import torch
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_half

from treadle.kernels.rope import rope


def make_table(length: int, rotated: int) -> torch.Tensor:
    angles = torch.arange(length)[:, None] / 100 ** (torch.arange(0, rotated, 2) / rotated)
    return torch.cat([angles.cos(), angles.sin()], -1)


def doubled(table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = table[positions].chunk(2, -1)
    return torch.cat([cos, cos], -1)[None].to(dtype), torch.cat([sin, sin], -1)[None].to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_is_llamas_with_a_table_in_the_models_dtype(dtype: torch.dtype):
    x, positions, table = torch.randn(7, 3, 16).to(dtype), torch.tensor([0, 5, 2, 9, 1, 8, 3]), make_table(10, 16)
    expected, _ = rotate_half(x[None].transpose(1, 2), x[None].transpose(1, 2), *doubled(table, positions, dtype))
    assert torch.equal(torch.ops.treadle.rope(x, positions, table.to(dtype)), expected[0].transpose(0, 1))


def test_interleaved_is_glms():
    x, positions, table = torch.randn(4, 3, 24), torch.tensor([0, 5, 2, 9]), make_table(10, 16)
    expected, _ = rotate_interleaved(
        x[None].transpose(1, 2), x[None].transpose(1, 2), *doubled(table, positions, x.dtype)
    )
    torch.testing.assert_close(rope(x, positions, table, "interleaved"), expected[0].transpose(0, 1))


@pytest.mark.parametrize("layout", ["half", "interleaved", "half_neg"])
@pytest.mark.parametrize("at", ["head", "tail"])
def test_a_rotation_keeps_lengths_and_its_inverse_undoes_it(layout: str, at: str):
    x, positions, table = torch.randn(6, 2, 20), torch.arange(6), make_table(6, 12)
    y = rope(x, positions, table, layout, at)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(y, x)
    still = slice(12, None) if at == "head" else slice(0, 8)
    assert torch.equal(y[..., still], x[..., still])
    torch.testing.assert_close(rope(y, positions, table, layout, at, True), x)


def test_scores_depend_on_the_distance_only():
    q, k, table = torch.randn(1, 1, 16), torch.randn(1, 1, 16), make_table(30, 16)
    for layout in ("half", "interleaved", "half_neg"):
        near, far = (
            (rope(q, torch.tensor([i + 4]), table, layout) * rope(k, torch.tensor([i]), table, layout)).sum()
            for i in (0, 20)
        )
        torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-5)


def test_an_fp32_table_is_rounded_once():
    x, positions, table = torch.randn(5, 2, 16).bfloat16(), torch.arange(5), make_table(5, 16)
    assert torch.equal(rope(x, positions, table), rope(x.float(), positions, table).bfloat16())


def test_a_stopped_row_reads_the_table_inside_its_bounds():
    x = torch.randn(2, 1, 8)
    y = rope(x, torch.tensor([-1, 0]), make_table(3, 8))
    assert torch.equal(y, x)


@pytest.mark.parametrize(("layout", "at"), [("halves", "head"), ("half", "middle")])
def test_an_unknown_choice_is_refused(layout: str, at: str):
    with pytest.raises(ValueError, match="is n"):
        rope(torch.randn(1, 1, 4), torch.tensor([0]), make_table(2, 4), layout, at)
