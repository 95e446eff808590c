"""verify names the broken promise: each kind of break, made on purpose."""

from dataclasses import replace

import pytest
from toy import Toy

from treadle.graph.ir import Level
from treadle.graph.verify import GraphError, verify
from treadle.graph.weights import Ints
from treadle.passes.place_state import PlaceState


def test_sound_graphs_pass() -> None:
    verify(Toy().graph())
    verify(PlaceState()(Toy().graph()))


def test_an_arena_has_no_place_in_a_model_graph() -> None:
    placed = PlaceState()(Toy().graph())
    with pytest.raises(GraphError, match=r"layer0\.arena: arena has no place at level model"):
        verify(replace(placed, level=Level.MODEL))


def test_a_missing_binding_is_named() -> None:
    graph = Toy().graph()
    first, *rest = graph.calls
    weights = {name: expr for name, expr in first.weights.items() if name != "embed_weight"}
    with pytest.raises(GraphError, match=r"call 0 of embed: binds \['embed_weight'\] wrongly"):
        verify(replace(graph, calls=(replace(first, weights=weights), *rest)))


def test_a_binding_of_another_type_is_named() -> None:
    graph = Toy().graph()
    first, *rest = graph.calls
    with pytest.raises(GraphError, match="binds embed_weight to a weight of another type"):
        verify(replace(graph, calls=(replace(first, weights={**first.weights, "embed_weight": Ints((1,))}), *rest)))


def test_a_stream_must_come_from_an_earlier_call() -> None:
    graph = Toy().graph()
    with pytest.raises(GraphError, match="reads x, which no call before it yields"):
        verify(replace(graph, calls=graph.calls[1:]))


def test_ops_without_a_kernel_are_no_program() -> None:
    placed = PlaceState()(Toy().graph())
    with pytest.raises(GraphError, match="has no kernel chosen"):
        verify(replace(placed, level=Level.LOWERED))


def test_fused_ops_do_not_stand_in_a_model_graph() -> None:
    placed = PlaceState()(Toy().graph())
    with pytest.raises(GraphError, match=r"cache_write\.default is no op of level model|arena has no place"):
        verify(replace(placed, level=Level.MODEL))
