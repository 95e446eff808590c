from __future__ import annotations

from treadle.kernels.backend import open_backend
from treadle.serve.bench import ceilings


def test_every_ceiling_is_measured(monkeypatch):
    monkeypatch.setattr(ceilings, "LARGEST_BYTES", 1 << 20)
    monkeypatch.setattr(ceilings, "SMALLEST_SIDE", 64)
    monkeypatch.setattr(ceilings, "LARGEST_SIDE", 128)
    found = ceilings.measure_ceilings(open_backend("cpu", threads=1))
    memory = ["read_gb_s", "copy_gb_s", "to_device_gb_s", "to_host_gb_s"]
    assert list(found) == [*memory, "bfloat16_tflop_s", "float32_tflop_s"]
    assert all(value > 0 for value in found.values())
