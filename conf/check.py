"""Checks of a composed deployment that need neither a model nor a machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from treadle.conf.connector import read_connectors
from treadle.conf.errors import ConfigError, nearest
from treadle.conf.recipe import read_recipe
from treadle.conf.schema import GROUPS, PASSES, REQUIRED_PASSES, Deployment, PassesConfig
from treadle.conf.secret import is_sealed_wrongly, opens
from treadle.conf.size import parse_bytes, parse_share, spell_bytes

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
"""The parameters of requests that ``model.sampling`` may give a default."""


ALIASES = {"half": "float16", "single": "float32"}
"""What others call a choice where it does not look alike."""


def check(deployment: Deployment) -> Deployment:
    """Return ``deployment`` if each value is within its limits and no two contradict. Raises ConfigError."""
    for group in GROUPS:
        _check_values(group, getattr(deployment, group))
    _check_model(deployment)
    _check_pages(deployment)
    read_connectors(deployment.kv.connectors)
    _check_passes(deployment)
    _check_key(deployment.serve.api_key)
    _check_prefix(deployment.serve.metrics_prefix)
    read_recipe(deployment.bench.rows, deployment.bench.rivals)
    return deployment


def _check_values(prefix: str, config: Any) -> None:
    for spec in fields(config):
        key, value = f"{prefix}.{spec.name}", getattr(config, spec.name)
        _check_value(key, value, spec.metadata, spec.default)
        if is_dataclass(value):
            _check_values(key, value)


def _check_value(key: str, value: Any, limits: Any, default: Any) -> None:
    """Raise ConfigError if ``value`` is outside the choices, range or format that its field declares."""
    if value is None:
        return
    choices, low, high = limits["choices"], limits["low"], limits["high"]
    if choices and value not in choices:
        raise ConfigError(
            f"not one of {', '.join(choices)}",
            key=key,
            value=value,
            nearest=[f"{key}={c}" for c in nearest(ALIASES.get(value, value), choices)],
        )
    if low is not None and not limits["size"] and not value >= low:
        raise ConfigError(f"below its least value {low:g}", key=key, value=value, nearest=[f"{key}={low:g}"])
    if high is not None and not value <= high:
        raise ConfigError(f"above its greatest value {high:g}", key=key, value=value, nearest=[f"{key}={high:g}"])
    if limits["size"] and not (value == default == "auto" or (limits["share"] and parse_share(value))):
        otherwise = f"{key}={'null' if default is None else default}"
        if limits["share"] and value.strip().endswith("%"):
            raise ConfigError("not a share above 0 and up to 100 %", key=key, value=value, nearest=[f"{key}=90%"])
        try:
            size = parse_bytes(value)
        except ValueError:
            raise ConfigError("not a size", key=key, value=value, nearest=[f"{key}=2GiB", otherwise]) from None
        if size == 0:
            raise ConfigError("holds nothing", key=key, value=value, nearest=[otherwise])
        if low is not None and size < low:
            least = spell_bytes(int(low), up=True)
            raise ConfigError(f"below its least size {least}", key=key, value=value, nearest=[f"{key}={least}"])


def _check_model(deployment: Deployment) -> None:
    model = deployment.model
    _check_sampling(model.sampling)
    _check_patterns("model.allow_unused", model.allow_unused)
    _check_patterns("model.allow_missing", model.allow_missing)
    if model.weights == "dummy" and model.path is None and model.package is None and not model.config:
        raise ConfigError(
            "random weights need a shape",
            key="model.config",
            hint="choose one with model=llama3-8b or give model.path=DIR",
        )
    if model.weights == "checkpoint" and model.path is None and model.package is None:
        raise ConfigError(
            "no checkpoint to read",
            key="model.path",
            nearest=["model=hf model.path=DIR"] + (["model.weights=dummy"] if model.config else []),
        )


def _check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that no parameter with a default has; values are for who knows the model."""
    for name, value in sampling.items():
        if name not in SAMPLING:
            close = [f"model.sampling.{other}" for other in nearest(name, SAMPLING)]
            hint = f"those with a default: {', '.join(SAMPLING)}"
            raise ConfigError("no such default", key=f"model.sampling.{name}", value=value, nearest=close, hint=hint)


def _check_patterns(key: str, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"not a regular expression: {error}", key=key, value=pattern) from None


def _check_pages(deployment: Deployment) -> None:
    page_tokens = deployment.kv.page_tokens
    if page_tokens & (page_tokens - 1):
        below = 1 << (page_tokens.bit_length() - 1)
        raise ConfigError(
            "a page holds a power of two of tokens",
            key="kv.page_tokens",
            value=page_tokens,
            nearest=[f"kv.page_tokens={n}" for n in (below, below * 2) if n <= 256],
        )
    seqs, tokens = deployment.scheduler.max_num_seqs, deployment.scheduler.max_step_tokens
    if seqs is not None and tokens is not None and seqs > tokens:
        raise ConfigError(
            f"a step of {tokens} tokens cannot advance {seqs} sequences",
            key="scheduler.max_step_tokens",
            value=tokens,
            nearest=[f"scheduler.max_step_tokens={seqs}", f"scheduler.max_num_seqs={tokens}"],
        )


def _check_passes(deployment: Deployment) -> None:
    passes = deployment.passes
    problem = _order_problem(passes.order)
    if problem is not None:
        wanted = {*passes.order, *REQUIRED_PASSES}
        works = _spell_order([name for name in PASSES if name in wanted])
        raise ConfigError(
            problem, key="passes.order", value=_spell_order(passes.order), nearest=[f"passes.order={works}"]
        )
    if passes.quantize == "int8" and "quantize" not in passes.order:
        works = _spell_order(("quantize", *passes.order))
        raise ConfigError(
            "the order has no quantize",
            key="passes.quantize",
            value="int8",
            nearest=["passes.quantize=none", f"passes.order={works}"],
        )
    if passes.deterministic:
        _check_deterministic(passes)
    if passes.kernels == "reference" and passes.quantize == "int8":
        raise ConfigError(
            "reference kernels compute with unquantized weights",
            key="passes.quantize",
            value="int8",
            nearest=["passes.quantize=none", "passes.kernels=auto"],
        )


def _check_deterministic(passes: PassesConfig) -> None:
    """Raise ConfigError for choices under which a row's result depends on more than the row."""
    if passes.kernels == "reference":
        raise ConfigError(
            "reference kernels add in an order that depends on the batch",
            key="passes.kernels",
            value="reference",
            nearest=["passes.kernels=auto", "passes.deterministic=false"],
        )
    if not passes.compile or "compile" not in passes.order:
        works = _spell_order([name for name in PASSES if name in {*passes.order, "compile"}])
        raise ConfigError(
            "with passes.deterministic, bodies must be compiled: op by op, torch rounds by the place of a row",
            key="passes.compile" if not passes.compile else "passes.order",
            value="false" if not passes.compile else _spell_order(passes.order),
            nearest=["passes.compile=true" if not passes.compile else f"passes.order={works}"],
        )


def _order_problem(order: Sequence[str]) -> str | None:
    """Return what keeps an order from working, None if nothing does. Raises ConfigError for a name that no pass has."""
    for name in order:
        if name not in PASSES:
            close = nearest(name, PASSES)
            hint = "" if close else f"passes: {', '.join(PASSES)}"
            raise ConfigError(
                f"no pass is called {name}", key="passes.order", value=_spell_order(order), nearest=close, hint=hint
            )
    for name in order:
        if order.count(name) > 1:
            return f"{name} stands there twice"
    missing = [name for name in REQUIRED_PASSES if name not in order]
    if missing:
        return f"leaves out {' and '.join(missing)}, which every program needs"
    place, choose = (order.index(name) for name in REQUIRED_PASSES)
    if choose < place:
        return "choose_kernels works after place_state only"
    for index, name in enumerate(order):
        match PASSES[name]:
            case "model" if index > place:
                return f"{name} works before place_state only"
            case "sharded" if not place < index <= choose:
                return f"{name} works between place_state and choose_kernels only"
            case "lowered" if index < choose:
                return f"{name} works after choose_kernels only"
    return None


def _spell_order(order: Sequence[str]) -> str:
    return f"[{','.join(order)}]"


def _check_key(api_key: str | None) -> None:
    """Raise ConfigError for a key that an empty or blank one opens, most often a shell variable that is not set, and
    for one that nothing opens."""
    if api_key is not None and is_sealed_wrongly(api_key):
        hint = "behind sha256: stand 64 hexadecimal digits in lower case, as treadle lock writes them"
        raise ConfigError("no key opens it", key="serve.api_key", value=api_key, hint=hint)
    if api_key is not None and (not api_key.strip() or opens(api_key, "")):
        raise ConfigError("empty", key="serve.api_key", value=repr(api_key), hint="serve.api_key=null: no key")


def _check_prefix(prefix: str) -> None:
    """Raise ConfigError for a prefix with which no metric would have a name that Prometheus takes."""
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
        hint = "letters, digits, _ and :, not a digit first"
        raise ConfigError("not the beginning of a metric's name", key="serve.metrics_prefix", value=prefix, hint=hint)
