"""Compiles Triton kernels for sm_90 on a machine without a GPU, with the arguments that launches really have.

Runs in a process of its own (``compile_for_sm90``): a kernel that was imported for the interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHARED_BYTES = 232448
"""Shared memory that a program can have on sm_90."""


def compile_for_sm90(launches: str) -> list[dict[str, Any]]:
    """Run ``launches``, Python code that calls kernels' functions on CPU tensors, with compiling in place of running.

    Returns, for each launch in order: name, shared (bytes), wgmma (whether it uses the wide matrix instructions).
    """
    tests = Path(__file__).parent
    code = f"from triton_compile import compiling\nimport torch\nwith compiling() as compiled:\n{_indented(launches)}\n"
    code += "import json; print(json.dumps(compiled))"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(tests), *filter(None, [env.get("PYTHONPATH")])])
    env["TRITON_DEFAULT_FP_FUSION"] = "1"
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-30000:]
    result: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return result


@contextmanager
def compiling() -> Iterator[list[dict[str, Any]]]:
    """Within the block a launch compiles its kernel for sm_90 and runs nothing; yields what was compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime.jit import JITFunction

    compiled: list[dict[str, Any]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        values = {**dict(zip(self.arg_names, args)), **kwargs}
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        aligned: dict[tuple[int, ...], Any] = {}
        for index, parameter in enumerate(self.params):
            value = values.pop(parameter.name)
            if isinstance(value, TensorDescriptor):
                kind = f"tensordesc<{_type(value.base, True)[0][1:]}{value.block_shape},{value.layout!r}>"
                signature[parameter.name] = kind
                continue
            kind, divisible = _type(value, parameter.do_not_specialize)
            if parameter.is_constexpr or kind is None:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            signature[parameter.name] = kind
            if divisible:
                aligned[(index,)] = [["tt.divisibility", 16]]
        kind_of_source = GluonASTSource if isinstance(self, GluonJITFunction) else ASTSource
        source = kind_of_source(self, signature, constexprs=constants, attrs=aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=values)
        assert made.metadata.shared <= SHARED_BYTES, f"{self.__name__} takes {made.metadata.shared} bytes"
        compiled.append(
            {"name": self.__name__, "shared": made.metadata.shared, "wgmma": "wgmma.mma_async" in made.asm["ptx"]}
        )

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield compiled
    finally:
        JITFunction.run = original


def _type(value: Any, plain: bool) -> tuple[str | None, bool]:
    """Return Triton's type of an argument, None for one that it compiles in, and whether 16 divides it."""
    import torch

    if isinstance(value, torch.Tensor):
        names = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
        names |= {"int64": "i64", "int32": "i32", "int16": "i16", "uint8": "u8", "int8": "i8"}
        return "*" + names[str(value.dtype).removeprefix("torch.")], True
    if isinstance(value, int) and not isinstance(value, bool):
        if value == 1 and not plain:
            return None, False
        return ("i32" if abs(value) < 1 << 31 else "i64"), value % 16 == 0 and not plain
    return ("fp32", False) if isinstance(value, float) else (None, False)


def _indented(code: str) -> str:
    return "\n".join("    " + line for line in code.strip("\n").splitlines())
