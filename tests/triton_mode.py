"""Where Triton kernels run in tests: on a CUDA device where there is one, else in Triton's interpreter.

Import this before anything that imports Triton: the interpreter is chosen while Triton is imported.
"""

from __future__ import annotations

import os

import pytest
import torch

from treadle.kernels.backend.assembler import choose_assembler, driver_major

NATIVE = torch.cuda.is_available()
if NATIVE:
    # Matrix products under torch.use_deterministic_algorithms need it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    major, minor = torch.cuda.get_device_capability()
    choose_assembler(10 * major + minor, driver_major())
else:
    os.environ["TRITON_INTERPRET"] = "1"

_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = [_GPU] if NATIVE else ["cpu", _GPU]
"""Values of a parameter ``device``: tests on "cuda" have the marker gpu."""
