"""How a checkpoint recommends to sample: generation_config.json, or the general.sampling.* keys of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from treadle.graph.source import Source, SourceError

RECOMMENDED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""keys of generation_config.json that are taken -> the sampling parameters that they are"""

_GGUF = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def recommended(source: Source) -> dict[str, Any]:
    """Return the sampling parameters that the checkpoint gives a value, by their name in a request.

    Raises: SourceError for a file that is not one, or a value that is no number.
    """
    if source.kind == "gguf":
        names = {f"general.sampling.{key}": name for key, name in _GGUF.items()}
        # float32 in the file: give back the decimal that was meant
        values = {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in source.metadata.items() if k in names}
        return _numbers(values, names, str(source.path))
    if source.path is None or not (file := source.path / "generation_config.json").is_file():
        return {}
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise SourceError(f"not JSON: {error}", key=str(file)) from None
    if not isinstance(config, dict):
        raise SourceError("not a JSON object", key=str(file))
    return _numbers(config, RECOMMENDED, str(file))


def _numbers(config: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    found = {}
    for key, name in names.items():
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise SourceError(f"{key} is {value!r}, not a number", key=where, hint="model.generation_config=none")
        if value is not None:
            found[name] = value
    return found
