"""Before any test imports the program: torch's compiler imports Triton, and that is when its interpreter is chosen."""

import triton_mode  # noqa: F401
from hypothesis import settings

# The same cases in every run, so that a change is judged by what it changed; --hypothesis-profile=default draws others.
settings.register_profile("same", derandomize=True, print_blob=True)
settings.load_profile("same")
