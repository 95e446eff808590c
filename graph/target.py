"""Facts that a pass or a kernel may ask about where the program will run. Nothing here is looked up later."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """One rank's hardware and the policies that shape its program."""

    device: str
    """"cpu" or "cuda" """
    features: frozenset[str] = frozenset()
    """instruction sets or architectures, in the names the vendor uses: avx512f, avx512_bf16, sm_90"""
    threads: int = 1
    dtype: str = "float32"
    """of weights, activations and the KV cache"""
    page_tokens: int = 16
    kernels: str = "auto"
    """"auto", or "reference": plain torch only"""
    deterministic: bool = False
    """only kernels whose result for a row depends on that row alone, to the last bit"""
    max_tokens: int | None = None
    """tokens of the largest step that this lowering serves; None: any number"""
