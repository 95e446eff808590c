"""Chooses, before any test imports Triton, whether its kernels run natively or in its interpreter."""

import triton_mode  # noqa: F401
