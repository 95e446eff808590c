"""Random histories for the recurrences of single families, and what these mean, a token at a time in fp64."""

from __future__ import annotations

import torch
from block_cases import LONGEST, Case
from block_steps import ROW
from torch import Tensor
from torch.nn.functional import silu, softplus


def decay_scan(
    dtype: torch.dtype, heads: int = 2, dim: int = 16, rate: float = 0.5, sequences: int = 3, tokens: int = LONGEST
) -> Case:  # fmt: skip
    """``rate``: how fast the first head's state fades; each other's fades half as fast as the one before."""
    generator = torch.Generator().manual_seed(heads + dim)
    rows = []
    for _ in range(sequences):
        parts = silu(torch.randn(3, tokens, heads, dim, generator=generator))
        rows.append([(part * dim**-0.25).to(dtype) for part in parts])
    rates = -rate * 2.0 ** -torch.arange(heads)
    return Case(decay_oracle, rows, [ROW, ROW, ROW, rates], [], 4 * heads * dim * dim)


def rglru(
    dtype: torch.dtype, channels: int = 40, param: float = -1.0, sequences: int = 3, tokens: int = LONGEST
) -> Case:  # fmt: skip
    """``param``: the mean of those that decays are made of; far below 0 states hardly fade."""
    generator = torch.Generator().manual_seed(channels)
    # Slices of a wider row.
    wide = [torch.randn(tokens, 3 * channels + 1, generator=generator).to(dtype)[:, 1:] for _ in range(sequences)]
    biases = torch.randn(3, channels, generator=generator)
    biases[2] += param
    constants = [ROW, ROW, ROW, *biases.to(dtype)]
    return Case(rglru_oracle, [list(x.split(channels, 1)) for x in wide], constants, [], 4 * channels)


def token_shift(dtype: torch.dtype, channels: int = 40, sequences: int = 3, tokens: int = LONGEST) -> Case:
    generator = torch.Generator().manual_seed(channels)
    rows = [[torch.randn(tokens, channels + 3, generator=generator).to(dtype)[:, 3:]] for _ in range(sequences)]
    return Case(token_shift_oracle, rows, [ROW], [], dtype.itemsize * channels, dtype)


def wkv(
    dtype: torch.dtype, channels: int = 40, decay: float = -1.0, scale: float = 1.0, sequences: int = 3,
    tokens: int = LONGEST,
) -> Case:  # fmt: skip
    """``decay``: the mean of decays, logarithms of rates; ``scale`` of keys, whose exponentials may overflow."""
    generator = torch.Generator().manual_seed(channels)
    rows = []
    for _ in range(sequences):
        keys, values = torch.randn(2, tokens, channels, generator=generator)
        rows.append([(scale * keys).to(dtype), values.to(dtype)])
    decays, first = torch.randn(2, channels, generator=generator)
    return Case(wkv_oracle, rows, [ROW, ROW, decays + decay, first], [], 4 * 3 * channels)


def decay_oracle(q: Tensor, k: Tensor, v: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, rates = (x.double() for x in (q, k, v, rates))
    state = torch.zeros(*v.shape[1:], k.shape[2], dtype=torch.float64)
    out = torch.empty_like(v)
    for t in range(len(q)):
        state = state * rates.exp()[:, None, None] + torch.einsum("hv,hk->hvk", v[t], k[t])
        out[t] = torch.einsum("hvk,hk->hv", state, q[t])
    return out, state


def rglru_oracle(
    x: Tensor, in_gate: Tensor, a_gate: Tensor, in_bias: Tensor, a_bias: Tensor, param: Tensor
) -> tuple[Tensor, Tensor]:
    x, in_gate, a_gate, in_bias, a_bias, param = (
        each.double() for each in (x, in_gate, a_gate, in_bias, a_bias, param)
    )
    log_a = -8 * softplus(param) * torch.sigmoid(a_gate + a_bias)
    share = torch.sqrt(-torch.expm1(2 * log_a))
    share[0] = 1
    added = share * torch.sigmoid(in_gate + in_bias) * x
    state, out = torch.zeros_like(x[0]), torch.empty_like(x)
    for t in range(len(x)):
        state = out[t] = log_a[t].exp() * state + added[t]
    return out, state


def token_shift_oracle(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]]).double(), x[-1].double()


def wkv_oracle(k: Tensor, v: Tensor, decay: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    k, v, rate, first = k.double(), v.double(), decay.double().exp(), first.double()
    out = torch.empty_like(v)
    for t in range(len(k)):
        exponents = torch.cat([k[:t] - rate * torch.arange(t - 1, -1, -1)[:, None], (k[t] + first)[None]])
        out[t] = (torch.softmax(exponents, 0) * v[: t + 1]).sum(0)
    exponents = k - rate * torch.arange(len(k) - 1, -1, -1)[:, None]
    largest = exponents.amax(0)
    weights = torch.exp(exponents - largest)
    return out, torch.stack([(weights * v).sum(0), weights.sum(0), largest])
