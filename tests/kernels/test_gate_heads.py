import pytest
import torch

from treadle.kernels.activation import UnknownActivationError
from treadle.kernels.gate_heads import gate_heads


def test_a_gate_multiplies_all_channels_of_its_head():
    x, gate = torch.randn(3, 2, 4), torch.randn(3, 2)
    torch.testing.assert_close(gate_heads(x, gate, "sigmoid"), x * torch.sigmoid(gate)[:, :, None])
    with pytest.raises(UnknownActivationError, match="sigmoid"):
        gate_heads(x, gate, "sigmoyd")
