import pytest
import torch
from transformers.activations import XIELUActivation

from treadle.kernels.xielu import xielu


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_transformers_xielu(dtype: torch.dtype):
    module = XIELUActivation(dtype=dtype)
    with torch.no_grad():
        module.alpha_p.fill_(0.3)
        module.alpha_n.fill_(-0.2)
    x = torch.randn(5, 9).to(dtype)
    ours = xielu(x, module.alpha_p, module.alpha_n, module.beta, module.eps)
    assert torch.equal(ours, module._xielu_python(x))
