"""The Triton kernels against the reference: interpreted here, natively on a GPU, compiled for sm_90 anywhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latents import CAPTURED, REAL_BATCHES, arguments, check_captured, check_real, latents
from triton_compile import compile_for_sm90
from triton_mode import DEVICES

from treadle.kernels import latent_attention_launch, registry
from treadle.kernels.latent_attention_launch import Tiles, paged_latent_attention

REFERENCE = registry.reference("paged_latent_attention").function
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)

BATCHES = {
    "decode": ([9, 40, 1], [1, 1, 1], 0),
    "decode with a stopped sequence": ([9, 0, 40], [1, 1, 1], 0),
    "padded decode": ([9, 40, 0, 0], [1, 1, 0, 0], 2),
    "prompt": ([70], [70], 0),
    "chunk over a prefix": ([90], [12], 3),
    "mixed, padded, with stopped sequences": ([9, 0, 27, 0, 33, 0], [1, 1, 9, 2, 4, 0], 5),
}


@pytest.fixture(autouse=True)
def not_the_kernel_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention_launch, "for_hopper", lambda *_: False)


def on(device: str, args: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(value.to(device) if isinstance(value, torch.Tensor) else value for value in args)


def check(device: str, args: tuple[object, ...], **options: object) -> None:
    expected = REFERENCE(*args)
    got = paged_latent_attention(*on(device, args), **options).cpu()
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_kind_of_batch(device: str, dtype: torch.dtype, batch: str):
    lengths, counts, padding = BATCHES[batch]
    args = arguments(latents(lengths, 24, 4, dtype), lengths, counts, 3, 16, padding=padding)
    check(device, args)
    check(device, args, invariant=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"window": 11}, {"sinks": True}, {"choices": 7}])
@pytest.mark.parametrize("keys", [0, 8])
def test_every_option(device: str, options: dict[str, object], keys: int):
    # A stopped sequence chooses no keys, so it has no rows here.
    lengths, counts, padding = [9, 40, 27, 33], [1, 1, 9, 4], 5
    args = arguments(latents(lengths, 24, 4, torch.float32), lengths, counts, 19, 16, padding=padding, **options)
    check(device, args, tiles=Tiles(rows=16, block=16, warps=4, stages=2, keys=keys))


@settings(deadline=None, max_examples=25)
@given(st.data())
def interpreted_equals_the_reference(device: str, data: st.DataObject):
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    lengths = data.draw(st.lists(st.sampled_from([0, 1, 7, 33, 65, 80]), max_size=4))
    counts = [min(draw(1, 1, 2, 5, 20), length) or draw(0, 1) for length in lengths]
    k_dim = draw(9, 24, 33, 40)
    pages = latents(lengths, k_dim, draw(1, 3, 8, 16), draw(*DTYPES), data.draw(st.integers(0, 99)))
    choices = 0 if any(count > length for count, length in zip(counts, lengths)) else draw(0, 0, 5, 40)
    args = arguments(
        pages, lengths, counts, draw(1, 3, 16, 20), draw(8, k_dim - 8, k_dim - 1), 0 if choices else draw(0, 1, 17),
        draw(False, True), draw(0, 2), choices,
    )  # fmt: skip
    tiles = Tiles(
        rows=draw(16, 32), block=draw(16, 32), warps=4, stages=2, occupancy=draw(1, 8), keys=draw(0, 8, 16, 30),
        waves=draw(1, 4),
    )  # fmt: skip
    check(device, args, tiles=tiles)


@pytest.mark.parametrize("device", DEVICES)
def test_any_batch_equals_the_reference(device: str):
    interpreted_equals_the_reference(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("heads", "k_dim", "v_dim"), [(128, 576, 512), (40, 288, 256), (3, 100, 80)])
def test_the_sizes_of_models(device: str, heads: int, k_dim: int, v_dim: int):
    check(device, arguments(latents([40, 5], k_dim, 16, torch.bfloat16), [40, 5], [1, 2], heads, v_dim))


@pytest.mark.parametrize("device", DEVICES)
def test_pages_before_the_window_are_not_read(device: str):
    for counts in ([1, 1], [50, 50]):
        pages = latents([200, 200], 24, 4, torch.float32)
        args = arguments(pages, [200, 200], counts, 3, 16, window=20)
        expected = paged_latent_attention(*on(device, args))
        assert expected.isfinite().all()
        pages.table[:, : (200 - counts[0] - 20) // 4] = 0  # the scratch page, full of NaN here
        assert torch.equal(paged_latent_attention(*on(device, args)), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"window": 30}, {"choices": 9}])
def test_a_row_can_be_computed_alike_in_every_step(device: str, options: dict[str, int]):
    lengths, counts = [80, 30], [20, 1]
    args = on(device, arguments(latents(lengths, 24, 4, torch.float32), lengths, counts, 5, 16, **options))
    one = slice(19, 20)
    alone = (
        args[0][one], args[1], args[2][:1], args[3].new_tensor([0, 1]), args[4][:1], *args[5:11],
        None if args[11] is None else args[11][one],
    )  # fmt: skip
    together = paged_latent_attention(*args, invariant=True)
    assert torch.equal(paged_latent_attention(*alone, invariant=True), together[one])


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_and_no_sequences(device: str):
    empty = latents([], 24, 4, torch.float32)
    assert paged_latent_attention(*on(device, arguments(empty, [], []))).shape == (0, 3, 8)
    for padding in (2, 20):
        assert paged_latent_attention(*on(device, arguments(empty, [], [], padding=padding))).eq(0).all()


def test_every_variant_compiles_for_sm_90():
    compiled = compile_for_sm90(
        """
from treadle.kernels import latent_attention_launch
latent_attention_launch._processors = lambda device: 132

def launch(dtype, tokens, sequences, heads, k_dim, v_dim, pages=4096, choices=0, window=0, **more):
    latent_attention_launch.paged_latent_attention(
        torch.zeros(tokens, heads, k_dim, dtype=dtype), torch.zeros(256, dtype=torch.uint8),
        torch.zeros(sequences, pages, dtype=torch.int32), torch.zeros(sequences + 1, dtype=torch.int32),
        torch.zeros(sequences, dtype=torch.int32), torch.tensor(0), torch.zeros(heads, dtype=dtype), 16, 0.1, v_dim,
        window, torch.zeros(tokens, choices, dtype=torch.int32) if choices else None, pdl=True, **more,
    )

for dtype in (torch.bfloat16, torch.float16):
    launch(dtype, 64, 64, 128, 576, 512)                    # decode: attend, join
launch(torch.bfloat16, 1, 1, 16, 576, 512)
launch(torch.bfloat16, 4096, 1, 16, 576, 512)
launch(torch.bfloat16, 512, 64, 40, 288, 256, window=300)
launch(torch.bfloat16, 64, 64, 128, 576, 512, choices=2048)
launch(torch.bfloat16, 64, 64, 128, 576, 512, invariant=True)   # attend
launch(torch.float32, 64, 16, 16, 288, 256)
launch(torch.float32, 64, 16, 16, 576, 512)
"""
    )
    assert [each["name"] for each in compiled] == [*["attend", "join"] * 6, "attend", *["attend", "join"] * 2]
    assert all(each["wgmma"] for each in (compiled[0], compiled[2], compiled[6], compiled[8], compiled[10]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "k_dim", "v_dim"), [(128, 576, 512), (16, 576, 512), (40, 288, 256)])
@pytest.mark.parametrize("batch", REAL_BATCHES)
def test_real_sizes(batch: str, dtype: torch.dtype, heads: int, k_dim: int, v_dim: int):
    for options in ({}, {"pdl": True}, {"invariant": True}):
        check_real(paged_latent_attention, batch, heads, k_dim, v_dim, dtype, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("batches", CAPTURED)
def test_a_captured_step_serves_any_lengths(batches: tuple[list[int], list[int]]):
    check_captured(paged_latent_attention, batches, 32)
