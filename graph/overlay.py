"""The deployment's own keys over a config.json. A key that nobody reads is a mistake, not a wish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.conf.errors import ConfigError, nearest
from treadle.graph.family import config_keys

READ = frozenset({"architectures", "dtype", "model_type", "text_config", "torch_dtype"})
"""keys that are read whatever the family"""

BESIDE = frozenset(
    {
        "_name_or_path", "attention_dropout", "bos_token_id", "cache_implementation", "eos_token_id",
        "initializer_range", "pad_token_id", "pretraining_tp", "transformers_version", "use_cache",
    }
)  # fmt: skip
"""keys that a config.json written out in full has too, and that say nothing about how the decoder computes"""


def overlay(config: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the deployment's keys laid over it, inside its text part too if it has one."""
    merged = {**config, **over}
    inner = merged.get("text_config")
    if isinstance(inner, Mapping) and "text_config" not in over:
        merged["text_config"] = {**inner, **over}
    return merged


def refuse_unread(
    over: Mapping[str, Any], config: Mapping[str, Any] | None, family: str, search: Sequence[Path] = ()
) -> None:
    """Raise ConfigError for the first key of ``over`` that neither ``config`` has nor ``family`` reads.

    ``config`` is the checkpoint's config.json; None: there is none, ``over`` is all of it.
    """
    if not over:
        return
    read = config_keys(family, search) | READ
    known = read | (BESIDE if config is None else _keys(config))
    for key, value in [*over.items(), *_inner(over).items()]:
        if key in known:
            continue
        close = nearest(key, sorted(read))
        absent = "" if config is None else "the checkpoint's config.json has none, and "
        raise ConfigError(
            f"nothing reads it: {absent}family {family} asks for no such key",
            key=f"model.config.{key}",
            value=value,
            nearest=[f"model.config.{name}" for name in close],
            hint="" if close else f"{family} reads {', '.join(sorted(read))}",
        )


def _keys(config: Mapping[str, Any]) -> frozenset[str]:
    return frozenset([*config, *_inner(config)])


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else {}
