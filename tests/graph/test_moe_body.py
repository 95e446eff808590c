"""What a mixture of experts is built of, against the same written down one token and one expert at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.graph.layer_writer import BuildOptions, LayerWriter, ModelContext
from treadle.graph.moe_body import write_moe
from treadle.graph.spec import Latent, ModelSpec, Moe, Norm, Router, Shared, SpecError
from treadle.graph.weights import Concat, Leaf, WeightExpr
from treadle.kernels import registry

T, C, INNER, E, K = 6, 16, 8, 5, 2
NORM = Norm(eps=1e-2)


@dataclass(frozen=True)
class Shape:
    shape: tuple[int, ...]


def weights(**more: tuple[int, ...]) -> dict[str, Tensor]:
    shapes = {
        "router.weight": (E, C),
        "gate": (E, INNER, C),
        "up": (E, INNER, C),
        "down": (E, C, INNER),
        **{name.replace("__", "."): shape for name, shape in more.items()},
    }
    generator = torch.Generator().manual_seed(4)
    return {
        f"layers.0.mlp.{name}": torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 1)
        for name, shape in shapes.items()
    }


def load(expr: WeightExpr, tensors: dict[str, Tensor]) -> Tensor:
    if isinstance(expr, Concat):
        return torch.cat([load(part, tensors) for part in expr.parts], expr.dim)
    assert isinstance(expr, Leaf)
    return tensors[expr.name].to(getattr(torch, expr.dtype))


def run(op: Moe, tensors: dict[str, Tensor], x: Tensor, h: Tensor) -> Tensor:
    registry.load_all()
    spec = ModelSpec(
        family="test", hidden=C, vocab=9, max_positions=9, embed=None, final_norm=None, head=None, layers=(), rules=()
    )
    shapes = {name: Shape(tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = LayerWriter(ModelContext(spec, shapes, BuildOptions(dtype="float32", max_len=9, page_tokens=4)))
    streams = (writer.stream("x", C), writer.stream("h", C))
    made = write_moe(writer, op, *streams, "layers.0.mlp", "mlp")
    body = writer.finish("moe", {"y": made})
    given: dict[str, Any] = {"x": x, "h": h, **{name: load(expr, tensors) for name, expr in writer.bound.items()}}
    (y,) = body.function()(*(given[node.name] for node in body.placeholders))
    return y


def visit(tensors: dict[str, Tensor], x: Tensor, expert: int, prefix: str = "") -> Tensor:
    gate, up, down = (tensors[f"layers.0.mlp.{prefix}{name}"][expert] for name in ("gate", "up", "down"))
    return down @ (F.silu(gate @ x) * (up @ x))


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    made = x * (x.square().mean(-1, keepdim=True) + 1e-2).rsqrt()
    return made if weight is None else made * weight


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(T, C, generator=generator), torch.randn(T, C, generator=generator)


def test_zero_experts_return_their_input() -> None:
    x, h = inputs()
    tensors = weights(router__weight=(E + 3, C))
    made = run(Moe(experts=E, top_k=K, zero_experts=3), tensors, x, h)
    scores = (h @ tensors["layers.0.mlp.router.weight"].T).softmax(-1)
    visited = 0
    for t in range(T):
        total = torch.zeros(C)
        for expert in scores[t].topk(K).indices.tolist():
            visited += expert >= E
            total += scores[t, expert] * (h[t] if expert >= E else visit(tensors, h[t], expert))
        torch.testing.assert_close(made[t], total, atol=1e-5, rtol=1e-5)
    assert visited, "a test of nothing"


def test_a_correction_may_be_read_where_it_is_stored_only() -> None:
    x, h = inputs()
    tensors = weights(correction=(E,))
    plain, corrected, perhaps = (
        Moe(experts=E, top_k=K, router=Router(correction=kind)) for kind in (False, True, "optional")
    )
    stored = run(perhaps, tensors, x, h)
    assert torch.equal(stored, run(corrected, tensors, x, h))
    without = {name: tensor for name, tensor in tensors.items() if "correction" not in name}
    assert torch.equal(run(perhaps, without, x, h), run(plain, without, x, h))
    assert not torch.equal(stored, run(plain, without, x, h)), "a test of nothing"
    with pytest.raises(SpecError, match=r"the checkpoint has no layers\.0\.mlp\.correction"):
        run(corrected, without, x, h)


def test_experts_that_all_visit_come_behind_the_others() -> None:
    x, h = inputs()
    tensors = weights(
        router__weight=(E + 2, C), correction=(E,), always_gate=(2, INNER, C), always_up=(2, INNER, C),
        always_down=(2, C, INNER),
    )  # fmt: skip
    router = Router(score="sigmoid", correction=True, normalize=True, always=2, scale=1.5)
    made = run(Moe(experts=E, top_k=K, router=router), tensors, x, h)
    scores = (h @ tensors["layers.0.mlp.router.weight"].T).sigmoid()
    for t in range(T):
        chosen = (scores[t, :E] + tensors["layers.0.mlp.correction"]).topk(K).indices.tolist()
        share = 1.5 / (scores[t, chosen].sum() + scores[t, E:].sum())
        total = sum(share * scores[t, e] * visit(tensors, h[t], e) for e in chosen)
        total = total + sum(share * scores[t, E + i] * visit(tensors, h[t], i, "always_") for i in range(2))
        torch.testing.assert_close(made[t], total, atol=1e-5, rtol=1e-5)


def test_the_router_may_read_the_residual_stream_through_a_norm_of_its_own() -> None:
    x, h = inputs()
    tensors = weights(in_scale=(C,), expert_scale=(E,), expert_pre__weight=(C,), expert_post__weight=(C,))
    router = Router(input="residual", input_norm=NORM, per_expert_scale=True, normalize=True)
    made = run(Moe(experts=E, top_k=K, router=router, pre=NORM, post=NORM), tensors, x, h)
    get = {name.rpartition("mlp.")[2]: tensor for name, tensor in tensors.items()}
    logits = rms(x, get["in_scale"]) * C**-0.5 @ get["router.weight"].T
    for t in range(T):
        chosen = logits[t].topk(K).indices.tolist()
        share = logits[t, chosen].softmax(-1) * get["expert_scale"][chosen]
        inner = rms(x[t], get["expert_pre.weight"])
        total = sum(w * visit(tensors, inner, e) for w, e in zip(share, chosen))
        torch.testing.assert_close(made[t], rms(total, get["expert_post.weight"]), atol=1e-5, rtol=1e-4)


def test_latent_experts_work_in_a_narrower_space() -> None:
    x, h = inputs()
    narrow = 4
    tensors = weights(
        gate=(E, INNER, narrow), up=(E, INNER, narrow), down=(E, narrow, INNER), latent_in__weight=(narrow, C),
        latent_out__weight=(C, narrow), latent_norm__weight=(narrow,),
    )  # fmt: skip
    made = run(Moe(experts=E, top_k=K, latent=Latent(norm=NORM), out_scale=0.5), tensors, x, h)
    get = {name.rpartition("mlp.")[2]: tensor for name, tensor in tensors.items()}
    scores = (h @ get["router.weight"].T).softmax(-1)
    for t in range(T):
        inner = get["latent_in.weight"] @ h[t]
        total = sum(scores[t, e] * visit(tensors, inner, e) for e in scores[t].topk(K).indices.tolist())
        expected = get["latent_out.weight"] @ rms(total, get["latent_norm.weight"]) * 0.5
        torch.testing.assert_close(made[t], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("combine", ["sum", "average"])
@pytest.mark.parametrize("apply", ["output", "input"])
def test_a_shared_expert_is_added(apply: str, combine: str, gate: bool) -> None:
    x, h = inputs()
    tensors = weights(
        shared__gate__weight=(3, C), shared__up__weight=(3, C), shared__down__weight=(C, 3), shared_gate__weight=(1, C)
    )
    made = run(Moe(experts=E, top_k=K, apply=apply, shared=Shared(combine=combine, gate=gate)), tensors, x, h)
    scores = (h @ tensors["layers.0.mlp.router.weight"].T).softmax(-1)
    first, up, down = (tensors[f"layers.0.mlp.shared.{name}.weight"] for name in ("gate", "up", "down"))
    for t in range(T):
        share = torch.sigmoid(tensors["layers.0.mlp.shared_gate.weight"] @ h[t]) if gate else 1.0
        chosen = scores[t].topk(K).indices.tolist()
        if apply == "input":
            total = sum(visit(tensors, h[t] * scores[t, e], e) for e in chosen)
        else:
            total = sum(scores[t, e] * visit(tensors, h[t], e) for e in chosen)
        total = total + share * (down @ (F.silu(first @ h[t]) * (up @ h[t])))
        torch.testing.assert_close(made[t], total / 2 if combine == "average" else total, atol=1e-5, rtol=1e-4)


def test_what_has_no_kernel_is_refused() -> None:
    for op in (
        Moe(experts=E, top_k=K, router=Router(hash=True, softcap=2.0)),
        Moe(experts=E, top_k=K, inner_norm=NORM),
        Moe(experts=E, top_k=K, shared=Shared(act="situ", gated=False)),
    ):
        tensors = weights(shared__gate__weight=(3, C), shared__up__weight=(3, C), shared__down__weight=(C, 3))
        with pytest.raises(SpecError, match=r"layers\.0\.mlp.*no kernels yet"):
            run(op, tensors, *inputs())
    del tensors["layers.0.mlp.up"]
    with pytest.raises(KeyError, match=r"layers\.0\.mlp\.up"):
        run(Moe(experts=E, top_k=K), tensors, *inputs())


def test_a_choice_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match="6 of 5 experts"):
        Moe(experts=5, top_k=6)
    with pytest.raises(ValueError, match="needs a gate"):
        Moe(experts=5, top_k=1, act="situ", gated=False)
