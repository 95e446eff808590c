"""Facts about this machine, asked without torch: cores, memory, instruction sets."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

_FEATURE = re.compile(r"avx\w*|amx\w*|fma|f16c|sse4_2|asimd\w*|sve\w*|bf16|i8mm|vnni")


SPARE_BYTES = 512 << 20
"""Of main memory, what is left to others beside a 32nd: system, compilers, and the process that answers over HTTP."""

_LIMITS = {
    "": ("memory.max", "memory.current", "memory.stat"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
}
"""Controller -> files of a control group: its limit, what it uses, and how much of that are caches of files."""

_CAPABILITY = (75, 76)
"""the driver's numbers of the attributes major and minor compute capability"""


@dataclass(frozen=True)
class CudaDevice:
    """The first CUDA device that this process may use, as the driver describes it."""

    name: str
    memory_bytes: int
    capability: str
    """of its instruction set: sm_90"""


@functools.cache
def cuda_device() -> CudaDevice | None:
    """Return the CUDA device, None if there is no driver or no device. Asks the driver, without torch or a context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name, version = ctypes.create_string_buffer(256), [ctypes.c_int(), ctypes.c_int()]
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    failed = driver.cuDeviceGet(ctypes.byref(device), 0)
    failed |= driver.cuDeviceGetName(name, len(name), device)
    failed |= driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    for value, attribute in zip(version, _CAPABILITY):
        failed |= driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    if failed:
        return None
    return CudaDevice(name.value.decode(), size.value, f"sm_{version[0].value}{version[1].value}")


def num_cores() -> int:
    """Return how many cores this process may use: its affinity, cut by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for limit in _cgroup("cpu.max"):
        quota, _, period = limit.partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def memory_bytes() -> int:
    """Return the memory that this process can have: the machine's, cut by the container's limit."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for controller, names in _LIMITS.items() for limit in _cgroup(names[0], controller)]
    return min([size, *(int(limit) for limit in limits if limit.isdigit())])


def usable_bytes() -> int:
    """Return how much of ``memory_bytes`` a deployment may plan with: what others need is left out, at most an 8th."""
    whole = memory_bytes()
    return whole - min(whole // 8, SPARE_BYTES + whole // 32)


def available_bytes() -> int:
    """Return the memory that this process could take now: also what the kernel's caches give up on demand."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", meminfo.read_text(), re.MULTILINE)
        available = int(found[1]) * 1024 if found else available
    for controller, names in _LIMITS.items():
        for limit, used, stat in zip(*(_cgroup(name, controller) for name in names)):
            if limit.isdigit() and used.isdigit():
                files = re.findall(r"^(?:in)?active_file (\d+)$", stat, re.MULTILINE)
                available = min(available, int(limit) - int(used) + sum(map(int, files)))
    return max(0, available)


def cpu_features() -> tuple[str, ...]:
    """Return the instruction sets that matter to kernels, in the kernel's names, sorted: avx2, avx512f, amx_bf16 ..."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", _cpuinfo(), re.MULTILINE)
    return tuple(sorted(flag for flag in match[1].split() if _FEATURE.fullmatch(flag))) if match else ()


def cpu_name() -> str:
    """Return what the CPU calls itself."""
    match = re.search(r"^model name\s*:\s*(.*)$", _cpuinfo(), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(errors="replace") if path.exists() else ""


def _cgroup(name: str, controller: str = "") -> list[str]:
    """Return the values of a limit in this process's control group and in the ones around it."""
    root, values = Path("/sys/fs/cgroup") / controller, []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    inside = next((line.split(":", 2)[2] for line in lines if controller in line.split(":", 2)[1].split(",")), "/")
    folder = root / inside.lstrip("/")
    for place in (folder, *folder.parents):
        if not place.is_relative_to(root):
            break
        try:
            values.append((place / name).read_text().strip())
        except OSError:
            continue
    return values
