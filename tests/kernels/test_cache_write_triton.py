"""The Triton kernel of cache_write, rope_cache_write and norm_rope_cache_write against the references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Pages
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.graph.target import Target
from treadle.kernels import cache_write_triton, registry

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)
CAPACITY = 40
ARENA = {"cache_write": 2, "rope_cache_write": 4, "norm_rope_cache_write": 6}
"""Which argument is the arena."""


class Step:
    """Distinct places of two sequences for ``tokens`` tokens, every fourth of them stopped."""

    def __init__(
        self, tokens: int, heads: int, kv_heads: int, dim: int, v_dim: int, page_tokens: int, dtype: torch.dtype
    ) -> None:
        self.pages = Pages([0, 0], kv_heads, dim, v_dim, page_tokens, dtype, capacity=CAPACITY)
        places = torch.randperm(2 * CAPACITY, generator=self.pages.random)[:tokens]
        positions = places % CAPACITY
        positions[1::4] = -1
        # Slices of wider rows, as a fused projection gives.
        widths = [heads * dim, kv_heads * dim, kv_heads * v_dim]
        q, k, v = self.pages.randn(tokens, sum(widths)).split(widths, -1)
        self.q = q.view(tokens, heads, dim)
        self.k, self.v = k.view(tokens, kv_heads, dim), v.view(tokens, kv_heads, v_dim)
        self.state = (
            self.pages.arena, self.pages.table, (places // CAPACITY).int(), positions, self.pages.layer_offset,
            page_tokens,
        )  # fmt: skip

    def angles(self, rotated: int) -> torch.Tensor:
        angles = torch.rand(CAPACITY, rotated // 2, generator=self.pages.random) * 6
        return torch.cat([angles.cos(), angles.sin()], 1)


def check(device: str, op: str, *args: object) -> None:
    at, function = ARENA[op], getattr(cache_write_triton, op)
    mine = [value.to(device) if isinstance(value, torch.Tensor) else value for value in args]
    theirs = list(args)
    mine[at], theirs[at] = args[at].clone().to(device), args[at].clone()
    got, expected = function(*mine), registry.reference(op).function(*theirs)
    dtype = args[0].dtype
    tolerance = TOLERANCE[dtype]
    if expected is not None:
        torch.testing.assert_close(got.cpu(), expected, atol=tolerance, rtol=tolerance)
    ours, reference = mine[at].cpu().view(dtype), theirs[at].view(dtype)
    torch.testing.assert_close(ours, reference, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "page_tokens"), [(0, 4), (1, 16), (9, 3), (30, 16)])
def test_keys_and_values_are_written_as_they_are(device: str, dtype: torch.dtype, tokens: int, page_tokens: int):
    step = Step(tokens, 1, 3, 24, 20, page_tokens, dtype)
    expected, mine = step.pages.arena.clone(), step.pages.arena.to(device, copy=True)
    state = [value.to(device) if isinstance(value, torch.Tensor) else value for value in step.state[1:]]
    registry.reference("cache_write").function(step.k, step.v, expected, *step.state[1:])
    cache_write_triton.cache_write(step.k.to(device), step.v.to(device), mine, *state)
    assert torch.equal(mine.cpu(), expected)


def any_step_equals_the_reference(device: str) -> None:
    @settings(deadline=None, max_examples=25)
    @given(st.data())
    def equals(data: st.DataObject) -> None:
        def draw(*choices):
            return data.draw(st.sampled_from(choices))

        kv_heads, dim = draw(1, 2), draw(16, 31, 32, 48)
        rotated = draw(dim // 2 * 2, dim // 4 * 2)
        step = Step(draw(1, 2, 20), kv_heads * draw(1, 3), kv_heads, dim, draw(dim, 20), draw(1, 3, 16), draw(*DTYPES))
        turn = draw("half", "interleaved", "half_neg"), draw("head", "tail")
        if data.draw(st.booleans()):
            check(device, "rope_cache_write", step.q, step.k, step.v, step.angles(rotated), *step.state, *turn)
            return
        heads = step.q.shape[1]
        q_norm, k_norm = (
            None if shape is None else step.pages.randn(*shape)
            for shape in (draw(None, (dim,), (heads, dim)), draw(None, (dim,), (kv_heads, dim)))
        )
        norm = draw("rms", "l2", "layer"), 1e-5, draw(False, True), draw("after", "before")
        check(
            device, "norm_rope_cache_write", step.q, step.k, step.v, q_norm, k_norm, step.angles(rotated), *step.state,
            *turn, *norm,
        )  # fmt: skip

    equals()


@pytest.mark.parametrize("device", DEVICES)
def test_any_step_equals_the_reference(device: str):
    any_step_equals_the_reference(device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_step_of_real_size(dtype: torch.dtype, pdl: bool):
    step = Step(20, 32, 8, 128, 128, 16, dtype)
    weights, table = (step.pages.randn(128), step.pages.randn(128)), step.angles(128)
    expected_arena = step.pages.arena.clone()
    expected = registry.reference("norm_rope_cache_write").function(
        step.q, step.k, step.v, *weights, table, expected_arena, *step.state[1:]
    )
    inputs = [step.q, step.k, step.v, *weights, table, *step.state]
    inputs = [value.cuda() if isinstance(value, torch.Tensor) else value for value in inputs]
    clean = inputs[6].clone()
    cache_write_triton.norm_rope_cache_write(*inputs, pdl=pdl)
    inputs[6].copy_(clean)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = cache_write_triton.norm_rope_cache_write(*inputs, pdl=pdl)
    assert torch.equal(inputs[6], clean)
    graph.replay()
    torch.testing.assert_close(got.cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(
        inputs[6].cpu().view(dtype), expected_arena.view(dtype), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype],
        equal_nan=True,
    )  # fmt: skip


def test_every_variant_compiles_for_sm_90():
    compiled = compile_for_sm90(
        """
from treadle.kernels import cache_write_triton as kernel
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for tokens in (1, 300):
        q, k, v = (torch.zeros(tokens, heads, 96, dtype=dtype) for heads in (6, 2, 2))
        state = (
            torch.zeros(256, dtype=torch.uint8), torch.zeros(1, 9, dtype=torch.int32),
            torch.zeros(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int64), torch.tensor(0), 16,
        )
        table = torch.zeros(9, 64)
        kernel.cache_write(k, v, *state, pdl=True)
        kernel.rope_cache_write(q, k, v, table, *state, "interleaved", "tail", pdl=False)
        weight = torch.zeros(96, dtype=dtype)
        kernel.norm_rope_cache_write(q, k, v, weight, None, table, *state, "half", "head", "layer", pdl=True)
"""
    )
    assert [each["name"] for each in compiled] == ["write_heads"] * 18


def test_angles_in_low_precision_and_mixed_types_are_left_to_the_reference():
    target = Target(device="cuda", features=frozenset({"sm_90"}), dtype="bfloat16")
    dtypes = dict.fromkeys(("q", "k", "v", "q_norm"), torch.bfloat16) | {"table": torch.float32}
    for op in ("rope_cache_write", "norm_rope_cache_write"):
        names = [one.name for one in registry.candidates(op, target, {"dtypes": dtypes})]
        assert names == [f"{op}.triton_pdl", f"{op}.triton", f"{op}.reference"]
        for other in ({"table": torch.bfloat16}, {"v": torch.float32}):
            assert registry.candidates(op, target, {"dtypes": dtypes | other})[0].is_reference


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_has_the_same_bits_in_any_company(device: str):
    step = Step(20, 6, 2, 16, 16, 4, torch.bfloat16)
    table, norms = step.angles(16), [step.pages.randn(16) for _ in range(2)]

    def rotate(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        arena, pages, seq_ids, positions, offset, size = step.state
        given = (step.q[rows], step.k[rows], step.v[rows], *norms, table, arena.clone(), pages)
        moved = [each.to(device) for each in (*given, seq_ids[rows], positions[rows], offset)]
        out = cache_write_triton.norm_rope_cache_write(*moved, size, invariant=True)
        return out.cpu(), moved[6].cpu()

    whole, arena = rotate(slice(20))
    assert torch.equal(torch.cat([rotate(slice(first, first + 5))[0] for first in range(0, 20, 5)]), whole)
    written = rotate(slice(0, 5))[1]
    changed = written != step.state[0]
    assert changed.any()
    assert torch.equal(written[changed], arena[changed])
