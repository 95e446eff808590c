"""The Triton router against the reference: the same experts, ties to the lower id, and equal weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.kernels import registry, route_triton

REFERENCE = registry.reference("route").function
INFINITE = float("inf")


def logits_of(rows: int, experts: int, seed: int) -> torch.Tensor:
    """Logits so far apart that no rounding of their scores makes two of a row equal."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.stack([torch.randperm(experts, generator=generator) for _ in range(rows)])
    # a little apart from a grid, so that sums of two differ as well
    return (places + torch.rand(places.shape, generator=generator) / 3) * (8 / experts) - 5


def cap_error(scale: float = 1.0, cap: float = 0.0) -> float:
    """What a softcap leaves uncertain near zero: its tanh is made of an exponential, exact to eps times the cap."""
    return 4 * torch.finfo(torch.float32).eps * cap * scale


def check(device: str, logits: torch.Tensor, *given: object, **named: object) -> tuple[torch.Tensor, torch.Tensor]:
    expected, chosen = REFERENCE(logits, *given, **named)
    arguments = [value.to(device) if isinstance(value, torch.Tensor) else value for value in given]
    weights, ids = route_triton.route(logits.to(device), *arguments, **named)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert ids.tolist() == chosen.tolist()
    torch.testing.assert_close(weights.cpu(), expected, rtol=1e-5, atol=1e-6 + cap_error(*given[12:]))
    return weights.cpu(), ids.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", route_triton.SCORES)
@settings(deadline=None, max_examples=12)
@given(st.data())
def test_every_knob(device: str, score: str, data: st.DataObject):
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    groups, size = draw((1, 7), (1, 32), (1, 60), (3, 4), (4, 8), (8, 5))
    experts, always = groups * size, draw(0, 0, 2)
    kept = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, min(kept * size, 9)))
    seed = data.draw(st.integers(0, 99))
    rows = draw(1, 3, 9)
    generator = torch.Generator().manual_seed(seed)
    correction = torch.randn(experts, generator=generator) if draw(False, True) else None
    scale = torch.rand(experts + always, generator=generator) if draw(False, True) else None
    check(
        device, logits_of(rows, experts + always, seed), correction, scale, top_k, score, draw(False, True), groups,
        kept, draw("max", "top2"), -3.4e38, score != "none" and draw(False, True), draw(0.0, 0.1), draw(0.0, 0.5),
        draw(1.0, 2.5), draw(0.0, 30.0), always=always,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_many_experts_many_choices_and_rows_that_are_not_dense(device: str, dtype: torch.dtype):
    # multiples of 1/64: exact in every dtype
    wide = torch.stack([torch.randperm(1000) for _ in range(5)])[:, :200] / 64 - 8
    logits = wide.to(dtype)[:, :160]
    if dtype == torch.float32:
        check(device, logits, None, None, 32, normalize=True)
        check(device, logits.T.contiguous().T, torch.randn(160), None, 6, "sigmoid", groups=8, topk_groups=3)
    weights, ids = route_triton.route(logits.to(device), None, None, 8)
    expected = logits.float().softmax(-1).gather(1, ids.cpu().long())
    torch.testing.assert_close(weights.cpu(), expected)
    assert torch.equal(expected, logits.float().softmax(-1).topk(8).values)
    check(device, logits_of(2, 1000, 0), None, None, 22, "sigmoid")


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_choices_the_lower_id_comes_first(device: str):
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0, -0.0, 0.0, -0.0, 0.0], [-INFINITE] * 4 + [3.0]])
    _, ids = route_triton.route(logits.to(device), None, None, 3)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2], [4, 0, 1]]
    _, ids = route_triton.route(logits[:, :4].to(device), None, None, 2, "sigmoid", False, 2, 1, "top2", 0.0)
    assert ids.tolist() == [[1, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", route_triton.SCORES)
def test_a_row_that_is_not_finite_spares_the_others_and_names_experts(device: str, score: str):
    logits = logits_of(4, 12, 1)
    expected, chosen = REFERENCE(logits, None, None, 3, score)
    logits[1, 5] = logits[2] = float("nan")
    weights, ids = route_triton.route(logits.to(device), None, None, 3, score)
    assert weights.isnan().any(1).tolist() == [False, True, True, False]
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 12 for row in ids.tolist())
    assert ids[1, 0] == 5
    torch.testing.assert_close(weights[[0, 3]].cpu(), expected[[0, 3]])
    assert ids[[0, 3]].tolist() == chosen[[0, 3]].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_small_scores_keep_their_digits(device: str):
    logits = torch.tensor([[-40.0, -30.0, -20.0, 19.9, 20.1, 90.0]])
    check(device, logits, None, None, 6, "sqrtsoftplus")
    check(device, logits - 20, None, None, 4, "sigmoid", normalize=True, norm_min=1e-6)
    weights, _ = route_triton.route(torch.tensor([[-50.0, -60.0]], device=device), None, None, 2, "sqrtsoftplus")
    torch.testing.assert_close(weights.cpu(), torch.tensor([[-25.0, -30.0]]).exp(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device: str):
    weights, ids = route_triton.route(torch.randn(0, 8, device=device), None, None, 2, always=1)
    assert weights.shape == ids.shape == (0, 3)


def test_it_compiles_for_sm90():
    compiled = compile_for_sm90("""
from treadle.kernels.route_triton import route
for rows in (1, 4096):
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.zeros(rows, 128, dtype=dtype)
        route(logits, None, None, 8, normalize=True, pdl=True)
        route(logits, None, None, 4, score_after_topk=True, softcap=3.0)
    e = torch.zeros(256)
    route(torch.zeros(rows, 256), e, e, 8, "sigmoid", False, 8, 4, "top2", normalize=True, scale=2.5, pdl=True)
    route(torch.zeros(rows, 1000), None, None, 32, "sqrtsoftplus", norm_min=0.1, always=2, normalize=True)
""")
    assert len(compiled) == 12


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_has_the_same_bits_in_any_company(device: str):
    logits = logits_of(20, 8, 0).to(device)
    weights, ids = route_triton.route(logits, None, None, 2, normalize=True, invariant=True)
    for rows in (slice(0, 1), slice(19, 20), slice(2, 9)):
        some, chosen = route_triton.route(logits[rows], None, None, 2, normalize=True, invariant=True)
        assert torch.equal(some, weights[rows])
        assert torch.equal(chosen, ids[rows])
