"""A Mooncake store as a connector: engines lend memory to it, and a master knows where objects are.

Needs the extra ``treadle[mooncake]`` and the system's libibverbs.so.1, also without RDMA. Buffers are parts of the host
pool, which is registered once, so that nothing is copied on the way.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treadle.conf.connector import KEY, MooncakeOptions
from treadle.conf.errors import ConfigError
from treadle.conf.size import parse_bytes
from treadle.runtime.state.tiers.mooncake_master import MooncakeMaster, answers
from treadle.runtime.state.tiers.store import Scope, StoreError

LOCAL_BYTES = 16 << 20
"""Memory of the client's own, which what goes through registered buffers does not need."""
_UNREACHABLE = -900
"""Codes from here down: the master or another engine did not answer."""


class MooncakeStore:
    """Objects of all engines under one master, each in one place."""

    instant = False
    saves = True

    def __init__(self, options: MooncakeOptions) -> None:
        """Raises ConfigError if the package, or a library that it needs, is not installed."""
        self._options = options
        self._module = _import()
        self._prefix = ""
        self._store: Any = None
        self.master: MooncakeMaster | None = None

    def open(self, scope: Scope) -> None:
        """Connect to the master, or start one, and lend memory."""
        options = self._options
        self._prefix = f"treadle/{scope.namespace.hex()}/"
        if options.master is None and self.master is None:
            self.master = MooncakeMaster(Path(self._module.__file__).parent / "mooncake_master")
        master = options.master if self.master is None else self.master.address
        assert master is not None
        # The client would try for a minute and a half.
        if not answers(master):
            raise StoreError(f"no Mooncake master answers at {master}")
        store = self._module.MooncakeDistributedStore()
        lent = parse_bytes(options.memory)
        # No separate service for metadata: engines tell each other.
        code = store.setup(options.host, "P2PHANDSHAKE", lent, LOCAL_BYTES, options.protocol, options.devices, master)
        if code != 0:
            raise StoreError(f"the master at {master} does not take this engine: {code}")
        if len(scope.memory):
            address = _address(scope.memory)
            code = store.register_buffer(address, len(scope.memory))
            if code != 0:
                store.close()
                raise StoreError(f"host memory cannot be registered: {code}")
        self._store = store

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask the master."""
        return [code == 1 for code in self._check(self._store.batch_is_exist(self._names(keys)))]

    def load(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Copy objects of just the buffers' lengths from where they are."""
        sizes = [len(buffer) for buffer in buffers]
        codes = self._check(self._store.batch_get_into(self._names(keys), list(map(_address, buffers)), sizes))
        return [code == size for code, size in zip(codes, sizes, strict=True)]

    def save(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Put objects where there is room; where there is none, the store evicts, and takes later ones."""
        sizes = [len(buffer) for buffer in buffers]
        codes = self._check(self._store.batch_put_from(self._names(keys), list(map(_address, buffers)), sizes))
        return [code == 0 for code in codes]

    def release(self, keys: Sequence[bytes]) -> None:
        """Remove objects; one that somebody reads stays until its lease ends."""
        for name in self._names(keys):
            self._store.remove(name)

    def events(self) -> list[tuple[str, bytes]]:
        """Return nothing: the master tells whom it was told to."""
        return []

    def close(self) -> None:
        """Leave the store, with the memory that was lent and what is in it."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
        if self.master is not None:
            self.master.close()

    def usage(self) -> tuple[int, int]:
        """Return zeros: the master knows."""
        return 0, 0

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _check(self, codes: Sequence[int]) -> Sequence[int]:
        """Return the codes of a call. Raises StoreError if nobody answered it."""
        if codes and all(code <= _UNREACHABLE for code in codes):
            raise StoreError(f"the Mooncake store does not answer: {codes[0]}")
        return codes


def _import() -> Any:
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        missing = "libibverbs" in str(error)
        raise ConfigError(
            f"the connector cannot be loaded: {error}",
            key=KEY,
            value="mooncake",
            hint="apt-get install libibverbs1" if missing else "pip install 'treadle[mooncake]'",
        ) from error


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
