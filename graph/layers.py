"""The layer stack of a description: values that differ by layer are chosen, ops and tables are put in their places.

Any value below ``ops``, ``rope`` and ``layers.sub`` may differ by layer, in one of three forms:

- ``per_layer: [...]``, one value a layer;
- ``by_kind: {kind: value, else: value}``, by the names that ``layers.kinds`` lists;
- ``pattern: {list: [...] | null, first: n | period: p, at: [...], value: v, else: w}``: the list if there is one, else
  ``value`` in the first n layers, or at these places of every p layers, and ``else`` elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from treadle.conf.errors import nearest
from treadle.graph.decode import decode
from treadle.graph.spec import Branch, Feedforward, Layer, Mtp, Norm, Op, Scaling, SpecError, Sub

_FORMS = ("per_layer", "by_kind", "pattern")
_OP_SLOTS = ("op", "branches", "pre", "post", "post_residual")
_ROPE_ALIASES = {"su": "longrope", "mrope": "default"}


MAX_LAYERS = 1024
"""more than any model has, and few enough to describe each"""


def layer_count(count: object, raw: Mapping[str, Any]) -> int:
    """Return the number of layers. Raises: SpecError, so that nothing is made of a billion of them."""
    if type(count) is not int or not 1 <= count <= MAX_LAYERS:
        source = (raw.get("layers") or {}).get("count")
        stands = f"; it stands for {source}" if isinstance(source, str) else ""
        raise SpecError(
            "not a number of layers", key="layers.count", value=count, hint=f"1 to {MAX_LAYERS} are possible{stands}"
        )
    return count


class LayerReader:
    """Reads the ``layers``, ``ops`` and ``rope`` sections of one description whose interpolations are resolved."""

    def __init__(self, values: Mapping[str, Any], raw: Mapping[str, Any]) -> None:
        self.stack: Mapping[str, Any] = values.get("layers") or {}
        self._raw = raw
        self._norm = values.get("norm")
        self._ops: Mapping[str, Any] = values.get("ops") or {}
        self._tables: Mapping[str, Any] = values.get("rope") or {}
        self._made: dict[str, Any] = {}
        for name in self.stack:
            if name not in ("count", "kinds", "sub", "scalar"):
                raise SpecError("unknown field", key=f"layers.{name}", hint="known: count, kinds, sub, scalar")
        self._count = count = layer_count(self.stack.get("count"), raw)
        kinds = self.stack.get("kinds")
        self._kinds: list[str | None] = [None] * count
        if kinds is not None:
            self._kinds = [
                self._at(kinds if isinstance(kinds, dict) else {"per_layer": kinds}, i, "layers.kinds")
                for i in range(count)
            ]
            for i, kind in enumerate(self._kinds):
                if not isinstance(kind, str):
                    raise SpecError("the name of a kind of layer is required", key=f"layers.kinds[{i}]", value=kind)

    def layers(self) -> tuple[Layer, ...]:
        """Return every layer with the values it really has. Equal ops and norms are one object."""
        for name in self._ops:
            self._check_op(name)
        subs = self.stack.get("sub") or {}
        return tuple(
            Layer(
                index=i,
                kind=self._kinds[i],
                subs=tuple(
                    made
                    for name, sub in subs.items()
                    if (made := self._sub(name, sub, i, f"layers.sub.{name}")) is not None
                ),
            )
            for i in range(self._count)
        )

    def norm(self, value: Any, where: str) -> Norm | None:
        """Return the norm that ``value`` is (a map) or names; None for null."""
        if isinstance(value, str):
            if value != "norm":
                raise SpecError("no such norm", key=where, value=value, nearest=["norm"])
            value = self._norm
        return None if value is None else self._decode(Norm, value, where)

    def mtp(self, value: Mapping[str, Any]) -> Mtp:
        """Return the draft layers; their ops take the values of the last layer."""
        last = self._count - 1
        subs = [self._sub(name, sub, last, f"mtp.layer.{name}") for name, sub in (value.get("layer") or {}).items()]
        combine = dict(value.get("combine") or {})
        norms = [self.norm(norm, "mtp.combine.norms") for norm in combine.get("norms") or ()]
        head = dict(value.get("head") or {})
        data = {
            **value,
            "layer": [],
            "combine": {**combine, "norms": [msgspec.to_builtins(norm) for norm in norms]} if combine else None,
            "head": {**head, "norm": msgspec.to_builtins(self.norm(head.get("norm"), "mtp.head.norm"))}
            if head
            else None,
        }
        return msgspec.structs.replace(decode(Mtp, data, "mtp", self._raw), layer=tuple(sub for sub in subs if sub))

    def _sub(self, name: str, value: Any, layer: int, where: str) -> Sub | None:
        data = self._at(value, layer, where, lists=("op",))
        rest = {key: item for key, item in data.items() if key not in _OP_SLOTS}
        branches = tuple(
            branch
            for key, item in (data.get("branches") or {}).items()
            if (branch := self._branch(key, item, layer, f"{where}.branches.{key}")) is not None
        )
        op = self._op(data.get("op"), layer, f"{where}.op")
        if op is None and not branches:
            return None
        made: Sub = self._decode(Sub, {"name": name, **rest}, where)
        return msgspec.structs.replace(made, op=op, branches=branches, **self._norms(data, where))

    def _branch(self, name: str, data: Any, layer: int, where: str) -> Branch | None:
        data = self._at(data, layer, where, lists=("op",))
        op = self._op(data.get("op"), layer, f"{where}.op")
        if op is None:
            return None
        rest = {key: item for key, item in data.items() if key not in ("pre", "post")}
        norms = {key: self.norm(data.get(key), f"{where}.{key}") for key in ("pre", "post")}
        made: Branch = self._decode(
            Branch, {"name": name, **rest, "op": self._op_data(data["op"], layer, where)}, where
        )
        return msgspec.structs.replace(made, op=op, **norms)

    def _norms(self, data: Mapping[str, Any], where: str) -> dict[str, Norm | None]:
        return {key: self.norm(data.get(key), f"{where}.{key}") for key in ("pre", "post", "post_residual")}

    def _op(self, name: Any, layer: int, where: str) -> Op | None:
        if name is None or name == "none":
            return None
        made: Op = self._decode(Op, self._op_data(name, layer, where), f"ops.{name}")
        return made

    def _op_data(self, name: Any, layer: int, where: str) -> dict[str, Any]:
        if name not in self._ops:
            raise SpecError("no such op", key=where, value=name, nearest=nearest(str(name), self._ops))
        data: dict[str, Any] = self._with_tables(self._at(self._ops[name], layer, f"ops.{name}"), layer, f"ops.{name}")
        shared = data.get("shared")
        if data.get("op") == "moe" and isinstance(shared, dict):
            own = {field.encode_name for field in msgspec.structs.fields(Feedforward)} - {"intermediate"}
            data["shared"] = {**{key: value for key, value in data.items() if key in own}, **shared}
        return data

    def _check_op(self, name: str) -> None:
        """Refuse a mistake in an op that no layer of this checkpoint uses, but not a size that it lacks."""
        try:
            self._op(name, 0, f"ops.{name}")
        except SpecError as error:
            if "required" not in str(error):
                raise

    def _with_tables(self, value: Any, layer: int, where: str) -> Any:
        """Replace the names of rope tables, at any depth, by the tables of this layer."""
        if not isinstance(value, dict):
            return value
        return {
            key: self._table(item, layer, f"{where}.{key}")
            if key == "rope" and isinstance(item, str)
            else self._with_tables(item, layer, f"{where}.{key}")
            for key, item in value.items()
        }

    def _table(self, name: str, layer: int, where: str) -> dict[str, Any]:
        if name not in self._tables:
            raise SpecError("no such rope table", key=where, value=name, nearest=nearest(name, self._tables))
        table = self._at(self._tables[name], layer, f"rope.{name}")
        scaling = table.get("scaling") or {}
        if not isinstance(scaling, Mapping):
            raise SpecError("a map is required", key=f"rope.{name}.scaling", value=scaling)
        kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
        # config.json keeps more beside the scaling (theta, sections of image positions): only what stretches is kept
        known = {field.encode_name for field in msgspec.structs.fields(Scaling)}
        if kind != "proportional":
            # the share that turns is the table's size, which the description has worked out
            known.discard("partial_rotary_factor")
        kept = {key: value for key, value in scaling.items() if key in known}
        return {**table, "scaling": {**kept, "rope_type": _ROPE_ALIASES.get(kind, kind)}}

    def _decode(self, kind: Any, data: Any, where: str) -> Any:
        key = f"{kind}{data}"
        if key not in self._made:
            self._made[key] = decode(kind, data, where, self._raw)
        return self._made[key]

    def _at(self, value: Any, layer: int, where: str, lists: tuple[str, ...] = ()) -> Any:
        """Return ``value`` as it is in one layer. Keys in ``lists`` may hold a bare list, one item a layer."""
        if not isinstance(value, dict):
            return value
        form = next((form for form in _FORMS if set(value) == {form}), None)
        if form is None:
            return {
                key: self._at(
                    {"per_layer": item} if key in lists and isinstance(item, list) else item, layer, f"{where}.{key}"
                )
                for key, item in value.items()
            }
        choose = {"per_layer": self._listed, "by_kind": self._by_kind, "pattern": self._pattern}[form]
        return self._at(choose(value[form], layer, f"{where}.{form}"), layer, where)

    def _listed(self, values: Any, layer: int, where: str) -> Any:
        if not isinstance(values, list) or len(values) < self._count:
            length = len(values) if isinstance(values, list) else values
            raise SpecError(f"one value a layer is required, {self._count} in all", key=where, value=length)
        return values[layer]

    def _by_kind(self, values: Any, layer: int, where: str) -> Any:
        kind = self._kinds[layer]
        if kind in values:
            return values[kind]
        if "else" not in values:
            raise SpecError(
                f"has no value for layer {layer}", key=where, value=kind, nearest=nearest(str(kind), values)
            )
        return values["else"]

    def _pattern(self, pattern: Any, layer: int, where: str) -> Any:
        known = ("list", "first", "period", "at", "value", "else")
        for key in pattern:
            if key not in known:
                raise SpecError("unknown field", key=f"{where}.{key}", nearest=nearest(key, known))
        if pattern.get("list") is not None:
            return self._listed(pattern["list"], layer, where)
        if pattern.get("period") is not None:
            inside = layer % _whole(pattern["period"], 1, f"{where}.period") in (pattern.get("at") or ())
        else:
            inside = layer < _whole(pattern.get("first") or 0, 0, f"{where}.first")
        return pattern.get("value") if inside else pattern.get("else")


def _whole(value: Any, low: int, where: str) -> int:
    if type(value) is not int or value < low:
        raise SpecError(f"a whole number from {low} on is required", key=where, value=value)
    return value
