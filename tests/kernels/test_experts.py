from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from treadle.kernels.experts import expert_activation
from treadle.kernels.registry import reference

T, K, E, C, H = 7, 2, 5, 24, 10


def inputs(gated: bool = True, bias: bool = False, seed: int = 0) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    width = 2 * H if gated else H
    return {
        "x": randn(T, C),
        "weights": torch.rand(T, K, generator=generator),
        "ids": torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)]).int(),
        "up": randn(E, width, C) / C**0.5,
        "up_bias": randn(E, width) if bias else None,
        "down": randn(E, C, H) / H**0.5,
        "down_bias": randn(E, C) if bias else None,
    }


def expected(a: dict[str, torch.Tensor | None], weigh_input: bool = False, **options: object) -> torch.Tensor:
    """One token and one expert at a time, in float64."""
    d = {name: None if value is None else value.double() for name, value in a.items()}
    rows = []
    for t in range(T):
        total = torch.zeros(C, dtype=torch.float64)
        for j in range(K):
            e, w = int(a["ids"][t, j]), d["weights"][t, j]
            if not 0 <= e < E:
                continue
            x = d["x"][t] * w if weigh_input else d["x"][t]
            h = F.linear(x, d["up"][e], None if d["up_bias"] is None else d["up_bias"][e])
            h = expert_activation(h, **options)
            y = F.linear(h, d["down"][e], None if d["down_bias"] is None else d["down_bias"][e])
            total += y if weigh_input else y * w
        rows.append(total)
    return torch.stack(rows).float()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"act": "gelu", "gated": False},
        {"act": "swiglu_oai", "limit": 0.7, "alpha": 1.5},
        {"act": "situ", "beta": 4.0, "linear_beta": 25.0},
        {"limit": 0.3},
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_sum_over_the_chosen_experts(options: dict[str, object], bias: bool):
    a = inputs(bool(options.get("gated", True)), bias)
    torch.testing.assert_close(torch.ops.treadle.experts(**a, **options), expected(a, **options), atol=1e-5, rtol=1e-5)


def test_the_weight_may_multiply_the_input():
    a = inputs()
    found = torch.ops.treadle.experts(**a, weigh_input=True)
    torch.testing.assert_close(found, expected(a, weigh_input=True), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, expected(a))


def test_ids_that_are_no_expert_contribute_nothing():
    a = inputs()
    a["ids"][0], a["ids"][1, 0], a["ids"][2, 1] = -1, E, 1 << 30
    a["weights"][0] = torch.nan
    found = torch.ops.treadle.experts(**a)
    assert not found[0].any()
    torch.testing.assert_close(found, expected(a), atol=1e-5, rtol=1e-5)


def test_the_formulas_of_the_activations():
    gate, up = torch.linspace(-9, 9, 31), torch.linspace(5, -8, 31)
    x = torch.cat([gate, up])
    oai = gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)
    torch.testing.assert_close(expert_activation(x, "swiglu_oai", True, 7.0), oai)
    situ = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    torch.testing.assert_close(expert_activation(x, "situ", True, 0.0, 1.702, 4.0, 25.0), situ)


def test_nothing_to_do_and_low_precision():
    a = inputs()
    empty = {**a, "x": a["x"][:0], "weights": a["weights"][:0], "ids": a["ids"][:0]}
    assert torch.ops.treadle.experts(**empty).shape == (0, C)
    low = {n: v.bfloat16() if v is not None and n not in ("weights", "ids") else v for n, v in a.items()}
    found = torch.ops.treadle.experts(**low)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected(a), atol=0.1, rtol=0.1)


def test_the_reference_stands_in_graphs_as_itself():
    kernel = reference("experts")
    assert not kernel.inline
    assert kernel.function is torch.ops.treadle.experts.default
