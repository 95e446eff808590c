import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from treadle.graph import ops
from treadle.graph.target import Target
from treadle.kernels import registry
from treadle.kernels.registry import Kernel, UnknownKernelError

CPU = Target(device="cpu")


def wrong_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x @ weight.T * 1.01


def kernel(**changes: object) -> Kernel:
    fields = {"op": "linear", "name": "linear.wrong", "function": wrong_linear, "inline": True, "priority": 99}
    return Kernel(**{"supports": registry.always, **fields, **changes})  # type: ignore[arg-type]


def test_every_op_has_a_reference_that_comes_last():
    for op in ops.SCHEMAS:
        found = registry.candidates(op, CPU, {})
        assert found[-1] == registry.reference(op)
        assert sum(one.is_reference for one in found) == 1


def test_a_direct_call_of_an_op_runs_its_reference():
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    torch.testing.assert_close(torch.ops.treadle.linear(x, weight), x @ weight.T)


def test_an_opaque_kernel_has_the_schema_of_its_op():
    for op in ops.SCHEMAS:
        for one in registry.candidates(op, CPU, {}):
            if one.inline:
                continue
            schema = str(one.function._schema)  # type: ignore[attr-defined]
            assert schema.partition("(")[2] == str(ops.op(op)._schema).partition("(")[2]


def test_priority_decides_and_a_registration_ends_with_its_block():
    before = registry.candidates("linear", CPU, {})
    with registry.registered(kernel()) as added:
        assert registry.candidates("linear", CPU, {})[0] is added
        assert registry.named("linear.wrong") is added
    assert registry.candidates("linear", CPU, {}) == before


def test_a_registration_ends_when_the_block_fails():
    with pytest.raises(ZeroDivisionError), registry.registered(kernel()):
        raise ZeroDivisionError
    assert "linear.wrong" not in [one.name for one in registry.candidates("linear", CPU, {})]


def test_a_kernel_that_does_not_support_the_target_is_left_out():
    with registry.registered(kernel(supports=lambda target, attrs: "amx" in target.features)):
        names = [one.name for one in registry.candidates("linear", CPU, {})]
        assert "linear.wrong" not in names
        faster = Target(device="cpu", features=frozenset({"amx"}))
        assert registry.candidates("linear", faster, {})[0].name == "linear.wrong"


def test_no_cpu_kernel_is_offered_to_another_device():
    for op in ops.SCHEMAS:
        names = {one.name for one in registry.candidates(op, Target(device="cuda", features={"sm_90"}), {})}
        assert names <= {f"{op}.reference", f"{op}.triton", f"{op}.triton_pdl"}


def test_steps_begin_and_end_with_kernels_that_start_early_where_the_device_can():
    for op in ("begin_step", "end_step"):
        for features, best in (((), "triton"), (("sm_90",), "triton_pdl")):
            target = Target(device="cuda", features=frozenset(features))
            assert registry.candidates(op, target, {})[0].name == f"{op}.{best}"


def test_few_tokens_on_a_gpu_have_kernels_that_many_have_not():
    attrs = {"kind": "rms", "cast": "after", "groups": 1}
    for op in ("norm", "add_norm", "activation", "act_mul", "gated_activation", "linear", "linear_add"):
        for features, best in (((), "triton"), (("sm_90",), "triton_pdl")):
            few, many = (Target(device="cuda", features=frozenset(features), max_tokens=n) for n in (8, None))
            assert registry.candidates(op, few, attrs)[0].name == f"{op}.{best}"
            assert registry.candidates(op, many, attrs) == [registry.reference(op)]
            mixed = {**attrs, "dtypes": {"x": torch.float32, "a": torch.float32, "gate": torch.float32}}
            mixed["dtypes"] |= {"weight": torch.float16, "b": torch.float16, "up": torch.float16}
            if op not in ("activation", "gated_activation"):
                assert registry.candidates(op, few, mixed) == [registry.reference(op)]


def test_the_dtypes_of_the_node_count_before_those_of_the_model():
    attrs = {"dtypes": {"x": torch.float64, "weight": torch.float64}}
    assert [one.name for one in registry.candidates("linear", CPU, attrs)] == ["linear.reference"]
    assert registry.dtypes_of(CPU, attrs, "x", "bias") == {torch.float64}
    assert registry.dtypes_of(CPU, {}, "x", "bias") == {torch.float32}


def test_a_name_cannot_be_taken_twice():
    with pytest.raises(ValueError, match="registered twice"):
        registry.register(kernel(name="linear.reference"))


def test_an_unknown_op_or_kernel_names_the_nearest():
    with pytest.raises(UnknownKernelError, match="'linear'"):
        registry.register(kernel(op="linaer"))
    with pytest.raises(UnknownKernelError, match="linear_int8"):
        registry.candidates("linear_int9", CPU, {})


def tokens_arguments(tokens: int) -> dict[str, tuple[object, ...]]:
    """Arguments of every op whose reference is inline, for a batch of ``tokens``."""
    x, wide = torch.randn(tokens, 8), torch.randn(tokens, 16)
    heads = torch.randn(tokens, 2, 8)
    ids, weight, codes = torch.zeros(tokens, dtype=torch.int64), torch.randn(5, 8), torch.ones(5, 8, dtype=torch.int8)
    scale = torch.rand(5, 2)
    return {
        "embed": (ids, weight, 2.5),
        "linear": (x, weight, torch.randn(5)),
        "norm": (wide, torch.randn(16), None, "rms", 1e-6, True, 2, "before"),
        "add": (x, x, 0.5, 2.0),
        "add_norm": (x, x, torch.randn(8), None, 0.5, 1.0, "layer"),
        "activation": (x, "gelu"),
        "add_positions": (x, ids, weight, 2),
        "xielu": (x, *torch.rand(4, 1)),
        "q_temperature": (heads, ids, 0.5, 8, 1),
        "gate_heads": (heads, torch.randn(tokens, 2), "sigmoid"),
        "differential": (heads, *torch.randn(4, 8), 0.2, 1e-5),
        "act_mul": (x, x, "silu"),
        "gated_activation": (wide, "silu"),
        "linear_add": (wide, torch.randn(8, 16), torch.randn(8), x, 0.5, 2.0),
        "norm_gated_linear": (
            x,
            torch.randn(8),
            None,
            "rms",
            1e-6,
            True,
            1,
            "before",
            torch.randn(6, 8),
            torch.randn(6),
            "silu",
        ),
        "affine": (x, 0.5, 3.0, 2.0),
        "rope": (heads, ids, torch.randn(9, 6), "interleaved", "tail"),
        "linear_int8": (x, codes, scale, None, 4),
        "embed_int8": (ids, codes, scale, torch.bfloat16, 4, 2.5),
        "identity_experts": (x, torch.rand(tokens, 2), torch.tensor([[1, 7]] * tokens).int(), 4),
        "route": (
            x,
            torch.randn(6),
            torch.rand(8),
            2,
            "sigmoid",
            False,
            3,
            2,
            "top2",
            0.0,
            True,
            0.1,
            0.0,
            2.0,
            3.0,
            0.0,
            2,
        ),
        "multiply": (x, torch.randn(tokens, 8)),
        "gated_norm": (
            x,
            torch.randn(tokens, 8),
            torch.randn(8),
            torch.randn(8),
            "rms",
            1e-6,
            True,
            2,
            "after",
            "silu",
            True,
        ),
        "time_step": (x, torch.randn(8), 0.1, 2.0),
        "log_decay": (x, -torch.rand(8), torch.randn(8), -5.0),
    }


INLINE = tokens_arguments(1).keys()


def test_the_list_of_inline_references_is_whole():
    assert set(INLINE) == {op for op in ops.SCHEMAS if registry.reference(op).inline}


@pytest.mark.parametrize("op", INLINE)
def test_one_trace_of_an_inline_reference_serves_any_number_of_tokens(op: str):
    function = registry.reference(op).function

    def call(*tensors: torch.Tensor):
        left = iter(tensors)
        return function(*(next(left) if isinstance(a, torch.Tensor) else a for a in tokens_arguments(1)[op]))

    def tensors(tokens: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [a for a in tokens_arguments(tokens)[op] if isinstance(a, torch.Tensor)]

    traced = make_fx(call, tracing_mode="symbolic")(*tensors(7))
    for tokens in (7, 11):
        torch.testing.assert_close(traced(*tensors(tokens)), call(*tensors(tokens)))


def test_deterministic_targets_take_invariant_kernels_only():
    for device in ("cpu", "cuda"):
        target = Target(device=device, features=frozenset({"sm_90"}), deterministic=True)
        for op in ops.SCHEMAS:
            assert all(one.invariant for one in registry.candidates(op, target, {}))
        assert all("invariant" not in one.name for one in registry.candidates("linear", CPU, {}))
        for op in ("linear", "linear_int8", "paged_attention", "rope_cache_write", "norm", "route", "experts"):
            assert registry.candidates(op, target, {}), op
