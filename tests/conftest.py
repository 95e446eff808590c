"""Before any test imports the program: torch's compiler imports Triton, and that is when its interpreter is chosen."""

import triton_mode  # noqa: F401
