"""Latent attention in absorbed form against the same attention with keys and values written out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from one_layer import T, rms, run, spec_of
from torch import Tensor
from toy import HIDDEN, VOCAB

from treadle.graph.spec import Gate, Index, Mla, Norm, RopeTable, SpecError
from treadle.kernels.rope import rope

H, L, R, N, V = 4, 24, 8, 12, 20
SIZES: dict[str, Any] = {
    "heads": H, "kv_lora": L, "rope_dim": R, "nope": N, "v_dim": V, "lora_norm": Norm(eps=1e-5),
    "rope": RopeTable(dim=R),
}  # fmt: skip
LOW: dict[str, Any] = {"q_lora": 16}
INDEX = Index(kind="dsa", heads=16, dim=16, topk=5, rope=RopeTable(dim=R))


def turned(x: Tensor, layout: str) -> Tensor:
    angles = torch.outer(torch.arange(T).float(), 10000.0 ** (-torch.arange(0, R, 2).float() / R))
    return rope(x, torch.arange(T), torch.cat([angles.cos(), angles.sin()], -1), layout)


def chosen(op: Mla, h: Tensor, low: Tensor, weight: dict[str, Tensor], seen: Tensor) -> Tensor:
    """Return which keys each token sees, [T, T]."""
    index = op.index
    assert index is not None
    q = turned(((low if index.q_from == "q_lora" else h) @ weight["index.q"].T).view(T, index.heads, -1), index.layout)
    k = h @ weight["index.k"].T
    if index.k_norm is not None:
        k = torch.nn.functional.layer_norm(k, k.shape[1:], weight["index.k_norm"], eps=index.k_norm.eps)
    k = turned(k.view(T, 1, -1), index.layout)[:, 0]
    scores = torch.einsum("thd,sd->ths", q, k).relu()
    scores = torch.einsum("th,ths->ts", h @ weight["index.w"].T, scores).masked_fill(~seen, -torch.inf)
    return seen & torch.zeros_like(seen).scatter(1, scores.topk(index.topk, -1).indices, True)


def plainly(op: Mla, ids: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Return the logits, written down as the fields say."""
    x = w["embed.weight"][ids] * 1.5
    h = rms(x, w["layers.0.attn.pre.weight"])
    weight = {n.removeprefix("layers.0.attn.").removesuffix(".weight"): v for n, v in w.items() if ".attn." in n}
    low = source = h
    if op.q_lora is not None:
        raw = h @ weight["q_a"].T
        low = source = rms(raw, weight["q_a_norm"])
        if op.q_concat_raw:
            source = torch.cat([low, raw], -1)
    q = (source @ weight["q_b" if op.q_lora else "q"].T).view(T, H, N + R) * op.q_lora_scale
    latent, shared = (h @ weight["kv_a"].T).split([L, R], -1)
    latent = rms(latent, weight["kv_a_norm"]) * op.kv_lora_scale
    keys, values = (latent @ weight["kv_b"].T).view(T, H, N + V).split([N, V], -1)
    shared = shared.view(T, 1, R)
    if op.rope is not None:
        q = torch.cat([q[..., :N], turned(q[..., N:], op.layout)], -1)
        shared = turned(shared, op.layout)
    keys = torch.cat([keys, shared.expand(-1, H, -1)], -1)
    at = torch.arange(T)
    seen = at[:, None] >= at
    if op.window:
        seen &= at[:, None] - at < op.window
    if op.index is not None:
        seen = chosen(op, h, low, weight, seen)
    logits = torch.einsum("thd,shd->hts", q, keys).mul(op.scale).masked_fill(~seen, -torch.inf)
    if op.sinks:
        logits = torch.cat([logits, weight["sinks"].view(H, 1, 1).expand(-1, T, -1)], -1)
    o = torch.einsum("hts,shd->thd", logits.softmax(-1)[..., :T], values)
    if op.gate is not None:
        gate = torch.sigmoid((source if op.gate.source == "q_lora" else h) @ weight["gate"].T)
        o = o * (gate[..., None] if op.gate.per == "head" else gate.view(T, H, V))
    return rms(x + o.reshape(T, -1) @ weight["o"].T, w["final_norm.weight"]) @ w["embed.weight"].T


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layout": "half", "scale": 0.6},
        {"rope": None},
        {**LOW, "q_lora_scale": 1.7, "kv_lora_scale": 0.6},
        {**LOW, "q_concat_raw": True, "gate": Gate(source="q_lora")},
        {**LOW, "gate": Gate(source="q_lora", per="head")},
        {"gate": Gate(), "sinks": True},
        {"window": 6, "gate": Gate(per="head")},
        {"index": INDEX},
        {**LOW, "index": msgspec.structs.replace(INDEX, q_from="q_lora", k_norm=Norm(kind="layer", eps=1e-5))},
    ],
    ids=str,
)
def test_every_field_computes_what_it_says(fields: dict[str, Any]) -> None:
    op = Mla(**{**SIZES, **fields})
    ids = torch.randint(VOCAB, (T,), generator=torch.Generator().manual_seed(1))
    made, weights = run(spec_of(op), ids)
    torch.testing.assert_close(made, plainly(op, ids, weights), rtol=1e-4, atol=1e-4 * HIDDEN**0.5)


def test_what_has_no_kernel_is_refused_by_name() -> None:
    for fields, message in (
        ({"window": 4, "index": INDEX}, "window of a sparse attention"),
        ({"index": msgspec.structs.replace(INDEX, kind="block")}, r"index\.kind = 'block'"),
    ):
        with pytest.raises(SpecError, match=message):
            run(spec_of(Mla(**{**SIZES, **fields})), torch.zeros(T, dtype=torch.int64))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gate": {"from": "q_lora"}}, "q_lora is null"),
        ({"q_concat_raw": True}, "q_lora is null"),
        ({"rope": {"dim": 4}}, "rope turns 4 channels, and rope_dim is 8"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], message: str) -> None:
    plain = {"op": "mla", "heads": H, "kv_lora": L, "rope_dim": R, "nope": N, "v_dim": V}
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({**plain, **fields}, Mla)
