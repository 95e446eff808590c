"""The Triton experts against the reference and float64: every way, every form, and experts that nobody or all chose."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_compile import compile_for_sm90
from triton_mode import DEVICES, NATIVE

from treadle.graph.expert_rows import workspace_bytes
from treadle.graph.target import Target
from treadle.kernels import registry
from treadle.kernels.experts_blocks import Blocks, Tile
from treadle.kernels.experts_launch import experts

REFERENCE = registry.reference("experts").function
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
WAYS = {
    "vector whole": Blocks("vector", Tile(16, 32), Tile(8, 16)),
    "vector looped": Blocks("vector", Tile(8, 16), Tile(16, 8)),
    "shared": Blocks("shared", Tile(16, 16), Tile(16, 16), rows=2),
    "ordered": Blocks("ordered", Tile(8, 16), Tile(16, 16), rows=16, group=2),
    "ordered wide": Blocks("ordered", Tile(16, 16), Tile(16, 16), rows=64, group=1),
}
FORMS = (
    {},
    {"act": "gelu_new"},
    {"act": "relu2", "gated": False},
    {"act": "swiglu_oai", "limit": 0.7, "alpha": 1.5},
    {"act": "swiglu_oai"},
    {"act": "situ", "beta": 4.0, "linear_beta": 25.0},
    {"limit": 0.3},
)


def inputs(
    tokens: int, top_k: int, number: int, hidden: int, inner: int, *, gated: bool = True, bias: bool = False,
    dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu",
) -> dict[str, torch.Tensor | None]:  # fmt: skip
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).div_(shape[-1] ** 0.5).to(dtype)

    width = 2 * inner if gated else inner
    return {
        # rows as they lie in a wider tensor
        "x": (randn(tokens, hidden + 8) * hidden**0.5)[:, :hidden],
        "weights": torch.rand(tokens, top_k, generator=generator, device=device),
        "ids": torch.rand(tokens, number, generator=generator, device=device).topk(top_k).indices.int(),
        "up": randn(number, width, hidden),
        "up_bias": randn(number, width) if bias else None,
        "down": randn(number, hidden, inner),
        "down_bias": randn(number, hidden) if bias else None,
    }


def on(device: str, a: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: value if value is None else value.to(device) for name, value in a.items()}


def check(device: str, way: Blocks, a: dict[str, torch.Tensor | None], **options: object) -> torch.Tensor:
    expected = REFERENCE(**a, **options)
    found = experts(**on(device, a), **options, blocks=way)
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)
    return found.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("way", WAYS)
@settings(deadline=None, max_examples=5)
@given(st.data())
def test_every_way_gives_every_form(device: str, dtype: torch.dtype, way: str, data: st.DataObject):
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    form = draw(*FORMS)
    number, hidden, inner = draw(1, 3, 9), draw(5, 16, 24), draw(3, 10, 16)
    a = inputs(
        draw(1, 2, 7), data.draw(st.integers(1, min(number, 3))), number, hidden, inner,
        gated=bool(form.get("gated", True)), bias=draw(False, True), dtype=dtype, seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    check(device, WAYS[way], a, **form, weigh_input=draw(False, True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("top_k", [1, 2])
def test_ids_that_are_no_expert_contribute_nothing(device: str, way: str, top_k: int):
    a = inputs(6, top_k, 5, 16, 8, bias=True)
    a["ids"][0], a["ids"][1, 0], a["ids"][2, -1], a["ids"][5] = -1, 5, 1 << 30, -7
    a["weights"][0] = a["weights"][5] = a["x"][5] = torch.nan
    found = check(device, WAYS[way], a)
    assert not found[0].any()
    assert not found[5].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ids", [[[3]] * 21, [[-1]] * 4, [[0, 0], [4, 0], [4, 4]]], ids=["all one", "none", "twice"])
def test_all_rows_one_expert_no_expert_and_one_expert_twice(device: str, way: str, ids: list[list[int]]):
    a = inputs(len(ids), len(ids[0]), 5, 16, 8)
    a["ids"] = torch.tensor(ids, dtype=torch.int32)
    check(device, WAYS[way], a)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_values_that_are_not_finite_stay_in_their_row(device: str, way: str):
    a = inputs(4, 2, 3, 16, 8)
    a["x"][1, 7] = torch.nan
    found = experts(**on(device, a), blocks=WAYS[way])
    assert found.isnan().any(1).tolist() == [False, True, False, False]
    assert found[1].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_its_company(device: str):
    a = inputs(9, 2, 4, 16, 8, dtype=torch.float16)
    whole = experts(**on(device, a), blocks=WAYS["ordered"])
    part = {name: value[4:6] if name in ("x", "weights", "ids") else value for name, value in a.items()}
    assert torch.equal(experts(**on(device, part), blocks=WAYS["ordered"]), whole[4:6])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (3, 0), (1, 3), (2, 3), (90, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_blocks_that_are_chosen(device: str, tokens: int, top_k: int, dtype: torch.dtype):
    a = inputs(tokens, top_k, 4, 20, 6, dtype=dtype)
    expected = REFERENCE(**a)
    found = experts(**on(device, a))
    torch.testing.assert_close(found.cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    # strides that no kernel reads are made dense
    a = on(device, a) | {"up": a["up"].to(device).transpose(1, 2).contiguous().transpose(1, 2)}
    torch.testing.assert_close(experts(**a).cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("tokens", [1, 2, 300])
def test_the_workspace_is_within_its_bound(tokens: int, monkeypatch: pytest.MonkeyPatch):
    a = inputs(tokens, 3, 7, 16, 8, dtype=torch.float16)
    made: list[torch.Tensor] = []
    new_empty = torch.Tensor.new_empty

    def recorded(self: torch.Tensor, *given: object, **named: object) -> torch.Tensor:
        value = new_empty(self, *given, **named)
        # Triton's interpreter makes tensors too
        if sys._getframe(1).f_globals["__name__"].startswith("treadle."):
            made.append(value)
        return value

    monkeypatch.setattr(torch.Tensor, "new_empty", recorded)
    device = "cuda" if NATIVE else "cpu"
    experts(**on(device, a))
    own = sum(value.nbytes for value in made[1:])
    assert len(made) > 1
    assert 0 < own <= workspace_bytes(tokens, 3, 7, 16, 8, 2)


def test_it_compiles_for_sm90():
    compiled = compile_for_sm90("""
from treadle.kernels.experts_launch import experts
b = torch.bfloat16
for gated, bias, top_k, act, dtype, sizes in (
    (True, False, 8, "silu", b, (1, 8, 64, 1024)), (False, False, 6, "relu2", b, (1, 8)),
    (True, True, 4, "swiglu_oai", b, (1, 8)), (True, False, 1, "silu", torch.float32, (1, 600)),
):
    number, hidden, inner = 32, 2048, 760 if bias else 768
    up = torch.zeros(number, 2 * inner if gated else inner, hidden, dtype=dtype)
    down = torch.zeros(number, hidden, inner, dtype=dtype)
    up_bias, down_bias = (up[:, :, 0].contiguous(), down[:, :, 0].contiguous()) if bias else (None, None)
    for tokens in sizes:
        x, weights = torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(tokens, top_k)
        ids = torch.zeros(tokens, top_k, dtype=torch.int32)
        experts(
            x, weights, ids, up, up_bias, down, down_bias, act, gated, 7.0 if bias else 0.0,
            weigh_input=top_k == 1, pdl=True,
        )
""")
    names = {each["name"] for each in compiled}
    assert names == {"gate_up_vector", "down_vector", "_count", "_place", "gate_up", "down", "reduce"}
    products = [each for each in compiled if each["name"] in ("gate_up", "down")]
    assert sum(each["wgmma"] for each in products) >= len(products) // 2


REAL = {"qwen3-30b": (2048, 768, 128, 8), "mixtral": (4096, 14336, 8, 2)}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL)
@pytest.mark.parametrize("tokens", [1, 3, 8, 32, 100, 600])
def test_real_sizes(shape: str, tokens: int):
    hidden, inner, number, top_k = REAL[shape]
    a = inputs(tokens, top_k, number, hidden, inner, dtype=torch.bfloat16, device="cuda", seed=tokens)
    a["ids"][tokens // 2, 0] = -1
    expected = REFERENCE(**a)
    for pdl in (False, True):
        torch.testing.assert_close(experts(**a, pdl=pdl), expected, atol=4e-2, rtol=4e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 128])
def test_a_captured_call_serves_any_ids(tokens: int):
    a = inputs(tokens, 4, 16, 512, 256, dtype=torch.bfloat16, device="cuda")

    def step() -> torch.Tensor:
        return experts(**a, pdl=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for ids in (torch.full_like(a["ids"], 3), torch.full_like(a["ids"], -1), torch.randint_like(a["ids"], 0, 18)):
        a["ids"].copy_(ids)
        a["x"].normal_()
        graph.replay()
        torch.testing.assert_close(out, REFERENCE(**a), atol=4e-2, rtol=4e-2)


def test_gpus_have_these_kernels_for_any_number_of_tokens():
    for tokens in (8, None):
        target = Target(device="cuda", features=frozenset({"sm_90"}), dtype="bfloat16", max_tokens=tokens)
        for op in ("experts", "route"):
            names = [kernel.name for kernel in registry.candidates(op, target, {})]
            assert names == [f"{op}.triton_pdl", f"{op}.triton", f"{op}.reference"]
    mixed = {"dtypes": {"x": torch.bfloat16, "up": torch.float32, "down": torch.bfloat16}}
    assert [kernel.name for kernel in registry.candidates("experts", target, mixed)] == ["experts.reference"]
    sparse = registry.candidates("route", target, {"score": "sparsemixer"})
    assert [kernel.name for kernel in sparse] == ["route.reference"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_has_the_same_bits_in_any_company(device: str):
    a = inputs(20, 2, 4, 32, 24, dtype=torch.bfloat16, device=device)
    whole = experts(**a, invariant=True)
    torch.testing.assert_close(whole.cpu(), REFERENCE(**a).cpu(), atol=4e-2, rtol=4e-2)
    for rows in (slice(0, 1), slice(19, 20), slice(2, 9)):
        some = {name: value[rows] if name in ("x", "weights", "ids") else value for name, value in a.items()}
        assert torch.equal(experts(**some, invariant=True), whole[rows])
