import pytest
import torch
import torch.nn.functional as F

from treadle.kernels.glu import glu


@pytest.mark.parametrize(
    ("act", "options", "expected"),
    [
        ("silu", {"limit": 0.5}, lambda g, u: F.silu(g.clamp(max=0.5)) * u.clamp(-0.5, 0.5)),
        ("silu", {}, lambda g, u: F.silu(g) * u),
        ("swiglu_oai", {"alpha": 1.3}, lambda g, u: g * torch.sigmoid(1.3 * g) * (u + 1)),
        (
            "situ",
            {"beta": 4.0, "linear_beta": 25.0},
            lambda g, u: 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25),
        ),
    ],
)
def test_it_is_what_experts_compute(act: str, options: dict[str, float], expected: object) -> None:
    gate, up = torch.randn(2, 4, 6)
    assert callable(expected)
    torch.testing.assert_close(glu(gate, up, act, **options), expected(gate, up))
