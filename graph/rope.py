"""Rotary tables: from a RopeTable to the angles of every position.

Source: the papers behind each kind (linear: position interpolation; dynamic: NTK-aware scaling; yarn; llama3: the
Llama 3.1 report; longrope), rounded step by step as the models were trained and as transformers computes them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from treadle.graph.spec import RopeTable


def rope_rows(table: RopeTable, rows: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the angles of positions 0 .. rows - 1: cosines, then sines.

    Kinds that depend on a sequence's length (dynamic, longrope) use one table for all: that of a sequence of ``rows``
    tokens. Up to the trained length it is the table of every shorter sequence too.

    Shapes: float32 [rows, dim], dim / 2 cosines and dim / 2 sines in a row.
    """
    inverse, factor = _frequencies(table, rows)
    positions = torch.arange(rows, dtype=torch.float32)
    angles = positions[:, None] * inverse[None, :]
    return torch.cat([angles.cos() * factor, angles.sin() * factor], dim=1).to(device)


def _frequencies(table: RopeTable, rows: int) -> tuple[Tensor, float]:
    """Return radians per position, float32 [dim / 2], and what cosines and sines are multiplied by."""
    scaling = table.scaling
    match scaling.rope_type:
        case "default":
            return _plain(table.theta, table.dim), 1.0
        case "linear":
            return _plain(table.theta, table.dim) / table.factor, 1.0
        case "dynamic":
            return _dynamic(table, rows), 1.0
        case "llama3":
            return _llama3(table), 1.0
        case "yarn":
            return _yarn(table)
        case "longrope":
            return _longrope(table, rows)
        case "proportional":
            return _proportional(table), 1.0


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _dynamic(table: RopeTable, rows: int) -> Tensor:
    scaling, dim = table.scaling, table.dim
    if scaling.alpha is not None:
        growth = scaling.alpha
    else:
        growth = table.factor * max(rows, table.trained) / table.trained - (table.factor - 1)
    return _plain(table.theta * growth ** (dim / (dim - 2)), dim)


def _llama3(table: RopeTable) -> Tensor:
    scaling, plain = table.scaling, _plain(table.theta, table.dim)
    factor, original = table.factor, table.original
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > original / low, plain / factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, (1 - smooth) * stretched / factor + smooth * stretched, stretched)


def _yarn(table: RopeTable) -> tuple[Tensor, float]:
    scaling, dim, theta = table.scaling, table.dim, table.theta
    original, factor = table.original, table.factor

    def channel(rotations: float) -> float:
        """The channel that turns this often over the original length."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp
    powers = theta ** (torch.arange(0, dim, 2).float() / dim)
    inverse = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.attention_factor is not None:
        return inverse, scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return inverse, magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return inverse, magnitude(1.0)


def _longrope(table: RopeTable, rows: int) -> tuple[Tensor, float]:
    scaling, dim = table.scaling, table.dim
    original, factor = table.original, table.factor
    divisors = scaling.long_factor if rows > original else scaling.short_factor
    inverse = 1.0 / (torch.tensor(divisors) * table.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if scaling.attention_factor is not None:
        return inverse, scaling.attention_factor
    return inverse, 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _proportional(table: RopeTable) -> Tensor:
    """The leading share of the channels turns, the rest stands still."""
    dim = table.dim
    turning = int(table.scaling.partial_rotary_factor * dim // 2)
    inverse = 1.0 / table.theta ** (torch.arange(0, 2 * turning, 2, dtype=torch.int64).float() / dim)
    return torch.cat([inverse, torch.zeros(dim // 2 - turning)]) / (table.scaling.factor or 1.0)
