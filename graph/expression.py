"""Interpolation in family descriptions: ``${hf:path}``, ``${x:'expression'}`` and ``${node.of.the.tree}``.

``${hf:a.b|c,default}`` is the first of these config.json entries that is there, else the default, else null.
``${x:'...'}`` is a side-effect free Python expression over config.json; names that it lacks are None.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any

from treadle.conf.errors import nearest
from treadle.graph.spec import SpecError

_NODES = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.Store,
    ast.List,
    ast.Tuple,
    ast.Dict,
    ast.ListComp,
    ast.comprehension,
    ast.Attribute,
    ast.Subscript,
    ast.Slice,
    ast.Call,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)
LONGEST = 1 << 16
"""of a range: more than any model has layers, and little enough to make a list of"""


def _range(*bounds: Any) -> range:
    """Return a range that does not take all memory, whatever config.json says. Raises: ValueError."""
    made = range(*bounds)
    if made[LONGEST:]:
        raise ValueError(f"a range of more than {LONGEST}")
    return made


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "range": _range,
    "len": len,
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "list": list,
    "max": max,
    "min": min,
    "sum": sum,
    "any": any,
    "sqrt": math.sqrt,
    "log": math.log,
    "exp": math.exp,
}
_METHODS = ("get", "index")


class _Entries(dict[str, Any]):
    """A JSON object whose entries read as attributes; absent ones are None."""

    def __getattr__(self, name: str) -> Any:
        return _entries(self.get(name))


def _entries(value: Any) -> Any:
    return _Entries(value) if isinstance(value, dict) else value


def evaluate(expression: str, config: Mapping[str, Any], where: str) -> Any:
    """Return the value of an expression over config.json. Raises SpecError if it is not allowed or fails."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise SpecError(f"not an expression: {error.msg}", key=where, value=expression) from None
    names = {}
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise SpecError(f"{type(node).__name__} may not stand in an expression", key=where, value=expression)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            raise SpecError(f"attribute {node.attr} may not be read", key=where, value=expression)
        if isinstance(node, ast.Call):
            _check_call(node, where, expression)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names[node.id] = _FUNCTIONS.get(node.id) or _entries(config.get(node.id))
    try:
        # Safe: the tree holds only the node kinds above, no attribute starts with _, and there are no builtins.
        return eval(compile(tree, where, "eval"), {"__builtins__": {}, **names})
    except Exception as error:
        absent = sorted(name for name, value in names.items() if value is None)
        hint = f"config.json has no {', '.join(absent)}" if absent else ""
        raise SpecError(f"{type(error).__name__}: {error}", key=where, value=expression, hint=hint) from error


def asked_keys(value: Any) -> frozenset[str]:
    """Return the keys of config.json, outermost only, that the interpolations in ``value`` (any tree) read."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return frozenset().union(*(asked_keys(part) for part in parts))
    if not isinstance(value, str) or not value.startswith("${"):
        return frozenset()
    kind, _, rest = value[2:-1].strip().partition(":")
    if kind == "hf":
        return frozenset(path.strip().partition(".")[0] for path in rest.partition(",")[0].split("|"))
    if kind != "x":
        return frozenset()
    try:
        names = [node for node in ast.walk(ast.parse(_unquoted(rest), mode="eval")) if isinstance(node, ast.Name)]
    except SyntaxError:
        return frozenset()  # evaluating it says what is wrong
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return frozenset(node.id for node in names if node.id not in _FUNCTIONS) - bound


def _unquoted(expression: str) -> str:
    expression = expression.strip()
    quoted = len(expression) > 1 and expression[0] == expression[-1] == "'"
    return expression[1:-1] if quoted else expression


def _check_call(node: ast.Call, where: str, expression: str) -> None:
    match node.func:
        case ast.Name(id=name) if name in _FUNCTIONS:
            return
        case ast.Attribute(attr=name) if name in _METHODS:
            return
        case _:
            known = ", ".join([*_FUNCTIONS, *(f".{name}" for name in _METHODS)])
            raise SpecError(
                f"{ast.unparse(node.func)} may not be called", key=where, value=expression, hint=f"known: {known}"
            )


class Resolver:
    """Replaces the interpolations of one description by values of one config.json."""

    def __init__(self, tree: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._tree = tree
        self._config = config

    def resolve(self, value: Any, where: str, seen: tuple[str, ...] = ()) -> Any:
        """Return ``value`` (any tree) with every interpolation replaced; ``where`` is its path, for errors."""
        if isinstance(value, dict):
            return {
                key: self.resolve(item, f"{where}.{key}" if where else str(key), seen) for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.resolve(item, f"{where}[{index}]", seen) for index, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        if not (value.startswith("${") and value.endswith("}")):
            raise SpecError("an interpolation must be the whole value", key=where, value=value)
        inner = value[2:-1].strip()
        if inner.startswith("hf:"):
            return self._config_value(inner[3:])
        if inner.startswith("x:"):
            return evaluate(_unquoted(inner[2:]), self._config, where)
        if inner in seen:
            raise SpecError(f"refers to itself through {' -> '.join(seen)}", key=where, value=value)
        return self.resolve(self._node(inner, where), inner, (*seen, inner))

    def _config_value(self, text: str) -> Any:
        paths, _, default = text.partition(",")
        for path in paths.split("|"):
            value: Any = self._config
            for key in path.strip().split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                return value
        return _scalar(default.strip())

    def _node(self, path: str, where: str) -> Any:
        node: Any = self._tree
        for key in path.split("."):
            if not isinstance(node, dict) or key not in node:
                choices = node if isinstance(node, dict) else ()
                raise SpecError(f"there is no {path} to refer to", key=where, nearest=nearest(key, choices))
            node = node[key]
        return node


def _scalar(text: str) -> Any:
    if text in ("", "null", "None"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("\"'")
