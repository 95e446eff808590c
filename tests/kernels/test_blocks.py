import pytest
import torch
from blocks import Memory

from treadle.kernels.blocks import Part, Rows


def part(memory: Memory, q_starts: list[int], positions: list[int], kv_lens: list[int]) -> Part:
    int32 = torch.int32
    tail = memory.tail(torch.tensor(q_starts, dtype=int32), torch.tensor(positions), torch.tensor(kv_lens, dtype=int32))
    return Part(*tail)


def test_sequences_without_tokens_and_stopped_ones_are_not_live():
    memory = Memory(5, (3,), torch.float32, flat=True)
    found = part(memory, [0, 2, 2, 3, 4, 6], [0, 1, -1, 7, -1, -1], [2, 9, 0, 8, 0]).live()
    assert found == [Rows(0, slice(0, 2), True), Rows(3, slice(3, 4), False)]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((5, 13), torch.float32), ((3, 3), torch.bfloat16), ((64,), torch.float32)]
)
def test_states_are_read_as_they_were_written(flat: bool, shape: tuple[int, ...], dtype: torch.dtype):
    memory = Memory(3, shape, dtype, flat=flat)
    own = part(memory, [0, 1, 2, 3], [4, 4, 4], [5, 5, 5])
    rows = [Rows(2, slice(2, 3), False), Rows(0, slice(0, 1), False)]
    states = torch.randn(2, *shape).to(dtype)
    own.write(rows, states)
    assert torch.equal(own.read(rows, shape, dtype), states)
    assert torch.equal(memory.state(2), states[0])
    assert memory.state(1).isnan().all()
    assert memory.others_untouched()


def test_a_fresh_sequence_begins_with_zeros_whatever_memory_holds():
    memory = Memory(2, (4, 4), torch.float32, flat=True)
    own = part(memory, [0, 1, 2], [0, 3], [1, 4])
    states = own.read(own.live(), (4, 4), torch.float32)
    assert (states[0] == 0).all()
    assert states[1].isnan().all()
