"""A tiny recipe, and the engine of its deployment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.conf.load import compose
from treadle.graph.resolve import resolve
from treadle.runtime.build import build_engine
from treadle.runtime.engine import Engine

VOCAB = 160


@pytest.fixture(scope="package")
def engine() -> Iterator[Engine]:
    folder = Path(__file__).parent / "conf"
    resolved = resolve(compose(["bench=tiny"], folder))
    assert resolved.spec.vocab == VOCAB
    engine = build_engine(resolved, lambda phase, done=0, total=0: None)
    yield engine
    engine.close()
