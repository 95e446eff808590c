from __future__ import annotations

import os

import pytest

from treadle.graph import machine


def test_no_more_than_the_machine_has():
    assert 1 <= machine.num_cores() <= (os.cpu_count() or 1)
    assert 1 << 28 < machine.memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.cpu_name()


def test_affinity_counts_not_the_machine():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert machine.num_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)])
def test_a_containers_quota_counts(monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(machine, "_cgroup", lambda name, controller="": [quota] if name == "cpu.max" else [])
    assert machine.num_cores() == cores


@pytest.mark.parametrize(("limit", "cut"), [("1048576", True), ("max", False), ("9223372036854771712", False)])
def test_a_containers_memory_limit_counts(monkeypatch, limit, cut):
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(machine, "_cgroup", lambda name, controller="": [limit] if name == "memory.max" else [])
    assert machine.memory_bytes() == (1048576 if cut else whole)


@pytest.mark.parametrize(
    ("whole_mib", "usable_mib"), [(1024, 896), (4096, 3584), (8192, 7424), (65536, 62976), (1 << 20, (1 << 20) - 33280)]
)
def test_something_is_left_to_others(monkeypatch, whole_mib, usable_mib):
    monkeypatch.setattr(machine, "memory_bytes", lambda: whole_mib << 20)
    assert machine.usable_bytes() == usable_mib << 20


def test_what_is_available_is_cut_by_a_container_whose_caches_give_way(monkeypatch):
    assert 0 < machine.available_bytes() < machine.memory_bytes()
    files = {"memory.max": "1000000", "memory.current": "900000", "memory.stat": "anon 1\nactive_file 300000\nfile 9\n"}
    monkeypatch.setattr(machine, "_cgroup", lambda name, controller="": [files[name]] if name in files else [])
    assert machine.available_bytes() == 400000
    files["memory.max"] = "max"
    assert machine.available_bytes() > 1000000
    files["memory.max"] = "500000"
    assert machine.available_bytes() == 0


def test_features_are_those_that_kernels_ask_for(monkeypatch):
    monkeypatch.setattr(machine, "_cpuinfo", lambda: "flags\t\t: fpu avx2 avx512f ht amx_bf16 fma svm avx512_bf16\n")
    assert machine.cpu_features() == ("amx_bf16", "avx2", "avx512_bf16", "avx512f", "fma")
    monkeypatch.setattr(machine, "_cpuinfo", lambda: "Features\t: fp asimd i8mm bf16 sve2\n")
    assert machine.cpu_features() == ("asimd", "bf16", "i8mm", "sve2")
    monkeypatch.setattr(machine, "_cpuinfo", lambda: "")
    assert machine.cpu_features() == ()


def test_without_a_driver_there_is_no_cuda_device(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(machine.ctypes, "CDLL", missing)
    machine.cuda_device.cache_clear()
    assert machine.cuda_device() is None
    machine.cuda_device.cache_clear()


class Driver:
    """Answers as libcuda does: through pointers, 0 for success."""

    count = 1

    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = 0
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = b"NVIDIA X"
        return 0

    def cuDeviceTotalMem_v2(self, size, device):
        size._obj.value = 80 << 30
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = {75: 9, 76: 0}[attribute]
        return 0


@pytest.mark.parametrize("count", [0, 1])
def test_the_driver_describes_the_device(monkeypatch, count):
    driver = Driver()
    driver.count = count
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: driver)
    machine.cuda_device.cache_clear()
    expected = machine.CudaDevice("NVIDIA X", 80 << 30, "sm_90") if count else None
    assert machine.cuda_device() == expected
    machine.cuda_device.cache_clear()
