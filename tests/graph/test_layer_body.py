"""How sublayers and branches write to the residual stream."""

from __future__ import annotations

from typing import Any

import pytest
from toy import Shape, Toy, lines

from treadle.graph.build import BuildOptions, build
from treadle.graph.expected import expected
from treadle.graph.spec import Branch, Csa, Layer, Mlp, ModelSpec, Norm, RopeTable, SpecError, Sub

NORM, MLP = Norm(eps=1e-5), Mlp(gated=False, act="relu", intermediate=8)


def body(*subs: Sub) -> list[str]:
    plain = Toy(windows=(0,)).spec()
    values = {field: getattr(plain, field) for field in ModelSpec.__struct_fields__}
    spec = ModelSpec(**{**values, "layers": (Layer(index=0, subs=subs),)})
    tensors = {name: Shape(item.shape) for name, item in expected(spec).items() if item.required}
    return lines(build(spec, tensors, BuildOptions(dtype="float32", max_len=8, page_tokens=4)))


def sums(written: list[str]) -> list[str]:
    return [line for line in written if "op.add(" in line]


def branches(**options: Any) -> Sub:
    parts = (Branch(name="a", op=MLP), Branch(name="b", op=MLP, scale=0.5))
    return Sub(name="block", pre=NORM, branches=parts, **options)


def test_branches_are_added_one_after_the_other_so_that_each_may_join_its_product() -> None:
    assert sums(body(branches(skip_scale=2.0, out_scale=3.0))) == [
        "a_residual = op.add(x, a_down, 2.0, 3.0)",
        "b_residual = op.add(a_residual, b_down, 1.0, 1.5)",
    ]


def test_a_norm_behind_branches_takes_their_sum() -> None:
    written = body(branches(post=NORM, out_scale=3.0))
    assert sums(written) == [
        "b_residual = op.add(a_down, b_down, 1.0, 0.5)",
        "block_residual = op.add(x, block_post, 1.0, 3.0)",
    ]
    assert any(line.startswith("block_post = op.norm(b_residual, block_post_weight") for line in written)


def test_branches_may_have_norms_and_scales_of_their_own() -> None:
    parts = (Branch(name="a", op=MLP, pre=NORM, in_scale=2.0), Branch(name="b", op=MLP, post=NORM))
    written = body(Sub(name="block", branches=parts))
    assert "a_in_scale = op.affine(a_pre, 2.0, 0.0, 0.0)" in written
    assert sums(written) == [
        "a_residual = op.add(x, a_down, 1.0, 1.0)",
        "b_residual = op.add(a_residual, b_post, 1.0, 1.0)",
    ]


def test_the_residual_may_be_the_normed_input_and_be_normed_itself() -> None:
    subs = (
        Sub(name="one", pre=NORM, op=MLP, residual_from="normed"),
        Sub(name="two", pre=NORM, op=MLP, residual_from="normed", post_residual=NORM),
    )
    written = body(*subs)
    assert sums(written) == [
        "one_residual = op.add(h, one_down, 1.0, 1.0)",
        "two_residual = op.add(two_pre, two_down, 1.0, 1.0)",
    ]
    assert any(line.startswith("next_norm = op.norm(two_post_residual") for line in written)


def test_what_has_no_kernel_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"layers\.0\.one: tap = 'x' has no kernels yet"):
        body(Sub(name="one", pre=NORM, op=MLP, tap="x"))
    csa = Csa(heads=2, head_dim=8, o_groups=1, window=4, norm=NORM, rope=RopeTable(dim=8))
    with pytest.raises(SpecError, match=r"layers\.0\.one: op csa has no kernels yet"):
        body(Sub(name="one", pre=NORM, op=csa))
