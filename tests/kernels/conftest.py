from collections.abc import Iterator

import pytest
import torch

from treadle.kernels import registry

registry.load_all()


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Every tensor made without a value is full of NaN, so that an element that a kernel forgets is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
