"""Residual topologies: what flows between layers, what a sublayer reads of it, and where its result goes.

``add`` is one sum of streams [T, C], and its bodies end behind the norm that the next layer opens with, so that a sum
and the norm that reads it stand in one body. The others are wider; their bodies are cut between layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch.fx import Node

from treadle.graph.layer_writer import LayerWriter, refuse
from treadle.graph.spec import Layer, ModelSpec, Sub

HYPER_KINDS = {"mhc": "mhc", "hc_diag": "diagonal"}
"""names of the description and of the ops"""


class Flow(ABC):
    """What flows through one body."""

    x: Node
    """what the router or norm of an op may read raw: the sum, or a mixture [T, C]"""

    @abstractmethod
    def read(self, sub: Sub, path: str) -> Node:
        """Return what a sublayer reads before its norm: [T, C]."""

    @abstractmethod
    def write(self, sub: Sub, y: Node, path: str, normed: Node) -> None:
        """Take a sublayer's result [T, C]; ``normed`` is what its op has read."""

    @abstractmethod
    def outputs(self) -> dict[str, Node]:
        """Return what the next body reads."""

    @abstractmethod
    def choose(self, rows: Node) -> None:
        """Keep these rows alone, [R] int64."""

    @abstractmethod
    def close(self) -> Node:
        """Return what the final norm reads: [T, C]."""


class SumFlow(Flow):
    """One sum: x = skip_scale * x + out_scale * y."""

    def __init__(self, writer: LayerWriter, x: Node) -> None:
        self.writer, self.x = writer, x

    def read(self, sub: Sub, path: str) -> Node:  # noqa: ARG002  (what flows may depend on it)
        """Return the sum itself."""
        return self.x

    def write(self, sub: Sub, y: Node, path: str, normed: Node) -> None:
        """Add the result, and norm the sum if the sublayer says so."""
        kept = self.kept(sub, normed)
        self.replace(
            sub, self.writer.op("add", kept, y, sub.skip_scale, sub.out_scale, label=f"{sub.name}_residual"), path
        )

    def kept(self, sub: Sub, normed: Node) -> Node:
        """Return what a sublayer's result is added to."""
        return normed if sub.residual_from == "normed" else self.x

    def replace(self, sub: Sub, x: Node, path: str) -> None:
        """Take the new sum."""
        self.x = self.writer.norm(sub.post_residual, x, f"{path}.post_residual", f"{sub.name}_post_residual")

    def outputs(self) -> dict[str, Node]:
        """Return the sum."""
        return {"x": self.x}

    def choose(self, rows: Node) -> None:
        """Keep these rows alone."""
        self.x = self.writer.choose(self.x, 0, rows, "rows")

    def close(self) -> Node:
        """Return the sum."""
        return self.x


class _Wide(Flow):
    """What the topologies that only add have in common: no scales, no norm of the sum."""

    def __init__(self, writer: LayerWriter, x: Node) -> None:
        self.writer, self.x, self.residual = writer, x, writer.model.spec.residual

    def refuse_scales(self, sub: Sub, path: str) -> None:
        """Raise for a field that this topology has no meaning for. Raises: SpecError."""
        later = {"post_residual": sub.post_residual, "residual_from": sub.residual_from == "normed" and "normed"}
        scales = {name: getattr(sub, name) for name in ("skip_scale", "out_scale") if getattr(sub, name) != 1.0}
        refuse(f"{path}: residual.kind = {self.residual.kind}", {**later, **scales})


class HyperFlow(_Wide):
    """N streams [T, N, C] that every sublayer reads as a sum of its own (kernels.hyper)."""

    def __init__(self, writer: LayerWriter, streams: Node, x: Node) -> None:
        super().__init__(writer, x)
        self.streams = streams
        self._spread: Node | None = None

    def read(self, sub: Sub, path: str) -> Node:
        """Return the sublayer's sum of the streams."""
        writer, residual, name = self.writer, self.residual, sub.name
        weights = [writer.float32(f"{path}.hc.{part}", f"{name}_hc_{part}") for part in ("fn", "base", "scale")]
        made = writer.op(
            "hyper_pre", self.streams, *weights, HYPER_KINDS[residual.kind], residual.iters, residual.eps,
            residual.norm_eps, residual.magnitude, label=f"{name}_hyper",
        )  # fmt: skip
        self.x = writer.item(made, 0, f"{name}_in")
        self._spread = writer.item(made, 1, f"{name}_spread")
        return self.x

    def write(self, sub: Sub, y: Node, path: str, normed: Node) -> None:  # noqa: ARG002  (kept by one sum alone)
        """Spread the result over the streams."""
        self.refuse_scales(sub, path)
        self.streams = self.writer.op("hyper_post", y, self.streams, self._spread, label=f"{sub.name}_residual")

    def outputs(self) -> dict[str, Node]:
        """Return the streams."""
        return {"x": self.streams}

    def choose(self, rows: Node) -> None:
        """Keep these rows alone."""
        self.streams = self.writer.choose(self.streams, 0, rows, "rows")

    def close(self) -> Node:
        """Return the head's sum of the streams."""
        writer, residual = self.writer, self.residual
        weights = [writer.float32(f"head_mix.hc.{part}", f"head_hc_{part}") for part in ("fn", "base", "scale")]
        return writer.op("hyper_close", self.streams, *weights, residual.eps, residual.norm_eps, label="head_mix")


class SnapshotFlow(_Wide):
    """One sum, and a bank of snapshots of it [T, S, C]; sublayers read a mixture (kernels.res_mix)."""

    def __init__(self, writer: LayerWriter, x: Node, bank: Node | None) -> None:
        super().__init__(writer, x)
        self.bank, self._sum, self._given = bank, x, bank

    def read(self, sub: Sub, path: str) -> Node:
        """Return the mixture, or the sum while the bank is empty."""
        self.x = self._mixed(f"{path}.res", sub.name)
        return self.x

    def write(self, sub: Sub, y: Node, path: str, normed: Node) -> None:  # noqa: ARG002  (kept by one sum alone)
        """Add the result, or set the sum aside and restart with the result."""
        self.refuse_scales(sub, path)
        writer = self.writer
        if not sub.snapshot:
            self._sum = writer.op("add", self._sum, y, label=f"{sub.name}_residual")
            return
        entry = writer.view(self._sum, (-1, 1, writer.model.spec.hidden), f"{sub.name}_snapshot")
        self.bank = entry if self.bank is None else writer.join([self.bank, entry], f"{sub.name}_bank", 1)
        self._sum = y

    def outputs(self) -> dict[str, Node]:
        """Return the sum, and the bank where it has grown."""
        return {"x": self._sum} | ({"bank": self.bank} if self.bank is not self._given and self.bank else {})

    def choose(self, rows: Node) -> None:
        """Keep these rows alone."""
        self._sum = self.writer.choose(self._sum, 0, rows, "rows")
        if self.bank is not None:
            self.bank = self.writer.choose(self.bank, 0, rows, "bank_rows")

    def close(self) -> Node:
        """Return the head's mixture."""
        return self._mixed("head_mix.res", "head")

    def _mixed(self, path: str, name: str) -> Node:
        if self.bank is None:
            return self._sum
        writer = self.writer
        norm = writer.weight(f"{path}.norm.weight", f"{name}_res_norm")
        project = writer.weight(f"{path}.proj.weight", f"{name}_res_proj")
        return writer.op("res_mix", self.bank, self._sum, norm, project, self.residual.eps, label=f"{name}_mix")


def open_flow(writer: LayerWriter, x: Node) -> dict[str, Node]:
    """Return what the first layer reads, from the embedding [T, C]."""
    residual = writer.model.spec.residual
    return {"x": writer.op("hyper_open", x, residual.streams, label="streams") if residual.kind in HYPER_KINDS else x}


def flow_of(writer: LayerWriter, snapshots: int) -> Flow:
    """Return what flows into a body; ``snapshots`` have been taken before it."""
    spec = writer.model.spec
    if spec.residual.kind in HYPER_KINDS:
        streams = writer.stream("x", spec.residual.streams, spec.hidden)
        return HyperFlow(writer, streams, streams)
    x = writer.stream("x", spec.hidden)
    if spec.residual.kind == "add":
        return SumFlow(writer, x)
    return SnapshotFlow(writer, x, writer.stream("bank", snapshots, spec.hidden) if snapshots else None)


def snapshots_before(spec: ModelSpec, layer: Layer | None) -> int:
    """Return how many snapshots the layers before ``layer`` take; None: all layers."""
    end = layer.index if layer is not None else len(spec.layers)
    return sum(sub.snapshot for before in spec.layers[:end] for sub in before.subs)
