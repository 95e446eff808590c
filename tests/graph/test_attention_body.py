"""What no dense family asks for, against a plain computation: gates, spans, temperatures, values that are keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_layer import T, rms, run, spec_of
from torch import Tensor
from toy import HIDDEN, VOCAB

from treadle.graph.spec import (
    Attention,
    Gate,
    Norm,
    QKNorm,
    Relative,
    SpecError,
    Temperature,
)

H, K, D = 4, 2, 16


def plainly(op: Attention, ids: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Return the same logits, written down as the fields say."""
    x = w["embed.weight"][ids] * 1.5
    h = rms(x, w["layers.0.attn.pre.weight"])
    weight = {name.split(".")[3]: value for name, value in w.items() if name.startswith("layers.0.attn.")}
    q, k = h @ weight["q"].T, h @ weight["k"].T
    v = k if op.v_from_k else h @ weight["v"].T
    k, v = k * op.k_scale, v * op.v_scale
    if op.clip:
        q, k, v = (part.clamp(-op.clip, op.clip) for part in (q, k, v))
    q, k, v = q.view(T, H, D), k.view(T, K, D), v.view(T, K, D)
    if op.qk_norm is not None:
        q, k = rms(q, weight.get("q_norm")), rms(k, weight.get("k_norm"))
    if op.v_norm is not None:
        v = rms(v)
    if op.q_temperature is not None:
        heat = op.q_temperature
        spans = torch.floor((torch.arange(T) + heat.shift) / heat.length)
        q = q * (1 + heat.beta * torch.log(1 + spans)).view(T, 1, 1)
    at = torch.arange(T)
    seen = at[:, None] >= at
    if op.chunk:
        seen &= at[:, None] // op.chunk == at // op.chunk
    parts = (part.transpose(0, 1) for part in (q, k, v))
    o = F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=op.scale, enable_gqa=True).transpose(0, 1)
    if op.gate is not None:
        gate = torch.sigmoid(h @ weight["gate"].T)
        o = o * (gate[..., None] if op.gate.per == "head" else gate.view(T, H, D))
    o = o.reshape(T, -1)
    if op.out_norm is not None:
        o = rms(o, weight["out_norm"])
    return rms(x + o @ weight["o"].T, w["final_norm.weight"]) @ w["embed.weight"].T


@pytest.mark.parametrize(
    "fields",
    [
        {"chunk": 8},
        {"gate": Gate(per="head")},
        {"gate": Gate(), "out_norm": Norm(eps=1e-5)},
        {"q_temperature": Temperature(beta=0.4, length=5, shift=1), "k_scale": 0.7, "v_scale": 1.3},
        {"v_from_k": True, "v_norm": Norm(eps=1e-5, weight=False), "qk_norm": QKNorm(eps=1e-5)},
        {"clip": 0.5, "scale": 0.4},
        {"qk_norm": QKNorm(eps=1e-5, scope="each_head"), "chunk": 6, "v_scale": 0.5},
    ],
    ids=str,
)
def test_every_field_computes_what_it_says(fields: dict[str, Any]) -> None:
    op = Attention(heads=H, kv_heads=K, head_dim=D, **fields)
    ids = torch.randint(VOCAB, (T,), generator=torch.Generator().manual_seed(1))
    made, weights = run(spec_of(op), ids)
    exact = plainly(op, ids, weights)
    torch.testing.assert_close(made, exact, rtol=1e-4, atol=1e-4 * HIDDEN**0.5)
    without = plainly(Attention(heads=H, kv_heads=K, head_dim=D), ids, {**weights, **missing(weights)})
    assert (exact - without).abs().max() > 0.05, "the field changes nothing here"


def missing(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    name = "layers.0.attn.v.weight"
    return {} if name in weights else {name: weights["layers.0.attn.k.weight"]}


@pytest.mark.parametrize(
    "fields", [{"rel": Relative(extent=4, dim=2), "softcap": 2.0}, {"gate": Gate(source="q_lora")}]
)
def test_what_has_no_kernel_is_refused_by_name(fields: dict[str, Any]) -> None:
    op = Attention(heads=H, kv_heads=K, head_dim=D, **fields)
    with pytest.raises(SpecError, match=r"layers\.0\.attn: (softcap|gate\.from) = .* has no kernels yet"):
        run(spec_of(op), torch.zeros(T, dtype=torch.int64))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_heads": 1, "diff": {"init": 0.2}}, "even number"),
        ({"v_from_k": True, "v_head_dim": 8}, "v_head_dim 8 must be head_dim 16"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], message: str) -> None:
    import msgspec

    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"op": "attention", "heads": H, "head_dim": D, **fields}, Attention)
