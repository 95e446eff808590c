"""Family descriptions: find, merge and resolve the YAML of a decoder family against one config.json.

A description says how config.json, tensor names and the vocabulary of ``graph.spec`` belong together. It may extend
another: maps merge, lists replace (a child's ``weights`` rules come first), ``_replace_: true`` drops the parent's map.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import treadle.conf
from treadle.conf.errors import nearest
from treadle.graph.decode import decode, decode_optional
from treadle.graph.expression import Resolver, asked_keys, evaluate
from treadle.graph.layers import LayerReader, layer_count
from treadle.graph.spec import (
    Embed,
    EndTokens,
    Head,
    ModelSpec,
    PerLayerInput,
    Quant,
    Residual,
    Rule,
    Sizes,
    SpecError,
)

FAMILIES = Path(next(iter(treadle.conf.__path__))) / "model" / "family"
"""The descriptions that come with treadle."""

SECTIONS = (
    "extends",
    "model_types",
    "defaults",
    "config",
    "variants",
    "sizes",
    "norm",
    "embed",
    "final_norm",
    "head",
    "rope",
    "residual",
    "ops",
    "layers",
    "per_layer_input",
    "mtp",
    "quant",
    "strip",
    "weights",
)
"""What a description may hold."""


def known_families(search: Sequence[Path] = ()) -> tuple[str, ...]:
    """Return the names of all families in ``search`` and in treadle itself."""
    return tuple(sorted({path.stem for folder in (*search, FAMILIES) for path in folder.glob("*.yaml")}))


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of config.json that describes the decoder: all of it, or its ``text_config``."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return dict(config)
    shared = ("tie_word_embeddings", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id")
    return {**{key: config[key] for key in shared if key in config}, **inner}


def family_for(config: Mapping[str, Any], search: Sequence[Path] = ()) -> str:
    """Return the family that describes models with this config.json.

    Raises: SpecError naming the nearest family if none does.
    """
    families = known_families(search)
    inner, outer = text_config(config).get("model_type"), config.get("model_type")
    wanted = [str(kind) for kind in (inner, outer) if kind]
    # A wrapper with a family of its own knows better than the part that it has taken over.
    for kind in reversed(wanted):
        if kind in families:
            return kind
    for family in families:
        if set(wanted) & set(_other_names(family, search)):
            return family
    for name in config.get("architectures") or () if not wanted else ():
        stem = str(name).removesuffix("ForCausalLM").lower()
        for family in families:
            if family.replace("_", "") == stem:
                return family
    if not wanted:
        raise SpecError("config.json names no model_type", key="model.family", hint=f"families: {', '.join(families)}")
    raise SpecError(
        "no family describes this model type",
        key="model_type",
        value=wanted[0],
        nearest=nearest(wanted[0], families),
        hint=f"families: {', '.join(families)}; more may stand in CONFIG_DIR/model/family/",
    )


def config_keys(family: str, search: Sequence[Path] = ()) -> frozenset[str]:
    """Return the keys of config.json that a family's description reads, in any of its variants. Raises: SpecError."""
    tree = _read(family, search)
    conditions = [f"${{x:{variant['if']}}}" for variant in tree.get("variants") or ()]
    filled = [*(tree.get("defaults") or {}), *(tree.get("config") or {})]
    return asked_keys([tree, conditions]) | frozenset(filled)


def load_spec(family: str, config: Mapping[str, Any], search: Sequence[Path] = ()) -> ModelSpec:
    """Return the decoder that a family's description and a config.json make together.

    ``search`` lists folders of ``<family>.yaml`` files to look in before treadle's own.

    Raises: SpecError with the path inside the description, the value and the nearest valid name.
    """
    tree = _read(family, search)
    config = _fill(tree, text_config(config))
    for index, variant in enumerate(tree.pop("variants", None) or []):
        if evaluate(str(variant.pop("if")), config, f"variants[{index}].if"):
            _merge(tree, variant)
    for name in tree:
        if name not in SECTIONS:
            raise SpecError("unknown section", key=name, nearest=nearest(name, SECTIONS), hint=f"in family {family}")
    tree.setdefault("final_norm", "${norm}")
    resolver = Resolver(tree, config)
    # Alone and first: other values may be made for every layer.
    layer_count(resolver.resolve((tree.get("layers") or {}).get("count"), "layers.count"), tree)
    values = {name: resolver.resolve(value, name) for name, value in tree.items()}
    reader = LayerReader(values, tree)
    sizes = decode(Sizes, values.get("sizes") or {}, "sizes", tree)
    mtp = values.get("mtp")
    decode(EndTokens, {"eos_token_id": config.get("eos_token_id")}, "config", tree)
    return ModelSpec(
        family=family,
        hidden=sizes.hidden,
        vocab=sizes.vocab,
        max_positions=sizes.max_positions,
        embed=decode(Embed, values.get("embed") or {}, "embed", tree),
        final_norm=reader.norm(values["final_norm"], "final_norm"),
        head=decode(Head, values.get("head") or {}, "head", tree),
        residual=decode(Residual, values.get("residual") or {}, "residual", tree),
        layers=reader.layers(),
        layer_scalar=bool(reader.stack.get("scalar")),
        per_layer_input=decode_optional(PerLayerInput, values.get("per_layer_input"), "per_layer_input", tree),
        mtp=reader.mtp(mtp) if mtp else None,
        quant=decode_optional(Quant, values.get("quant"), "quant", tree),
        strip=tuple(values.get("strip") or ()),
        rules=tuple(_rule(rule, f"weights[{index}]", tree) for index, rule in enumerate(values.get("weights") or ())),
        config=config,
    )


def _rule(data: Any, where: str, tree: Mapping[str, Any]) -> Rule:
    rule = decode(Rule, data, where, tree)
    try:
        pattern = re.compile(rule.m)
    except re.error as error:
        raise SpecError(f"not a regular expression: {error}", key=f"{where}.m", value=rule.m) from None
    targets = [rule.to] if rule.to else [to for to in rule.gsplit.to if to] if rule.gsplit else []
    if not targets and not rule.drop:
        raise SpecError("a rule needs one of to, gsplit and drop", key=where, value=rule.m)
    for target in targets:
        groups = max((int(digit) for digit in re.findall(r"\\(\d)", target)), default=0)
        if groups > pattern.groups:
            raise SpecError(f"{target} asks for group {groups} of {rule.m}", key=where)
    return rule


def _read(family: str, search: Sequence[Path], children: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a description merged over the ones it extends, interpolations still in place."""
    found = _find(family, search)
    if found is None:
        families = known_families(search)
        raise SpecError(
            "no such family",
            key="extends" if children else "model.family",
            value=family,
            nearest=nearest(family, families),
            hint=f"families: {', '.join(families)}",
        )
    if family in children:
        raise SpecError(f"extends itself through {' -> '.join(children)}", key="extends", value=family)
    child = copy.deepcopy(_parse(found, found.stat().st_mtime_ns))
    parent = child.pop("extends", None)
    if parent is None:
        return {key: _strip_marks(value) for key, value in child.items()}
    base = _read(str(parent), search, (*children, family))
    base.pop("model_types", None)
    return _merge(base, child)


def _find(family: str, search: Sequence[Path]) -> Path | None:
    return next((path for folder in (*search, FAMILIES) if (path := folder / f"{family}.yaml").is_file()), None)


def _other_names(family: str, search: Sequence[Path]) -> Sequence[str]:
    """Return the model types that a family names beside its own; files that name none are not parsed."""
    found = _find(family, search)
    if found is None or b"model_types" not in found.read_bytes():
        return ()
    return _parse(found, found.stat().st_mtime_ns).get("model_types") or ()


@functools.cache
def _parse(path: Path, written: int) -> dict[str, Any]:  # noqa: ARG001  (a file changed since is another one)
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (YAMLError, OmegaConfBaseException) as error:
        raise SpecError(f"not readable as YAML: {error}", key=str(path)) from None
    if not isinstance(tree, dict):
        raise SpecError("a description is a map", key=str(path))
    return {str(key): value for key, value in tree.items()}


def _merge(base: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    """Lay ``child`` over ``base`` in place and return ``base``."""
    for key, value in child.items():
        below = base.get(key)
        if key == "weights":
            base[key] = [*value, *(below or [])]
        elif key == "config":
            # a child's fills come first too: those of its parent may read them
            base[key] = {**value, **{name: text for name, text in (below or {}).items() if name not in value}}
        elif key == "variants":
            base[key] = [*(below or []), *value]
        elif isinstance(value, dict) and isinstance(below, dict) and not value.get("_replace_"):
            _merge(below, value)
        else:
            base[key] = _strip_marks(value)
    return base


def _strip_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strip_marks(item) for key, item in value.items() if key != "_replace_"}
    return value


def _fill(tree: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with what it may leave out: ``defaults`` for absent keys, then ``config`` for null ones."""
    filled = {**(tree.pop("defaults", None) or {}), **config}
    for name, value in (tree.pop("config", None) or {}).items():
        if filled.get(name) is None:
            filled[name] = Resolver(tree, filled).resolve(value, f"config.{name}")
    return filled
