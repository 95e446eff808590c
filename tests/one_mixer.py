"""The graph of a decoder of one layer with one mixer, and what tests read off it."""

from __future__ import annotations

from toy import Shape, Toy, lines

from treadle.graph.build import BuildOptions, build
from treadle.graph.expected import expected
from treadle.graph.ir import Graph
from treadle.graph.spec import Layer, ModelSpec, Norm, Op, Sub
from treadle.graph.state import BlockPart
from treadle.graph.weights import Leaf


def graph_of(op: Op, dtype: str = "float32", biases: tuple[str, ...] = ()) -> Graph:
    plain = Toy(windows=(0,)).spec()
    values = {field: getattr(plain, field) for field in ModelSpec.__struct_fields__}
    sub = Sub(name="mix", pre=Norm(eps=1e-5), op=op)
    spec = ModelSpec(**{**values, "layers": (Layer(index=0, subs=(sub,)),)})
    tensors = {
        name: Shape(tuple(size if size > 0 else 8 for size in item.shape))
        for name, item in expected(spec).items()
        if item.required or name.endswith(biases or ("?",))
    }
    return build(spec, tensors, BuildOptions(dtype=dtype, max_len=8, page_tokens=4))


def written(graph: Graph, name: str) -> str:
    (line,) = [line for line in lines(graph) if line.startswith(f"{name} = ")]
    return line.partition(" = ")[2]


def parts(graph: Graph) -> list[BlockPart]:
    assert graph.state.block is not None
    return list(graph.state.block.parts)


def bound(graph: Graph, name: str) -> object:
    return graph.calls[1].weights[name]


def leaf(name: str, *shape: int, dtype: str = "float32") -> Leaf:
    return Leaf(f"layers.0.mix.{name}", shape, dtype)
