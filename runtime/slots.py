"""Batch slots: what the device knows of each running sequence, so that a step needs no answer of the step before.

The host sends differences (``runtime.packet``); the tokens of decodes, their positions and whether they still run are
here. ``treadle::begin_step`` and ``treadle::end_step`` change them, on the stream, in launch order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from treadle.graph.packet import SLOT_WIDTH, Column
from treadle.kernels.adjust_logits import new_controls
from treadle.kernels.backend.protocol import Backend
from treadle.runtime.sampler import RowParams
from treadle.runtime.slot_load import Array, SlotLoad


class Slots:
    """Device arrays over ``num_slots`` sequences; the host never reads them.

    One slot more belongs to nobody: it is never active, all its pages are the scratch page, and padding points at it.
    Shapes: rows [num_slots + 1, SLOT_WIDTH] int64; page_tables [num_slots + 1, num_groups, max_pages] int32; history,
    where there are processors that want it, [num_slots + 1, max_len] int32.
    """

    def __init__(
        self, num_slots: int, num_groups: int, max_pages: int, backend: Backend, *, vocab: int, history_tokens: int = 0
    ) -> None:
        device = backend.device
        self._backend = backend
        self.nobody = num_slots
        self.rows = torch.zeros(num_slots + 1, SLOT_WIDTH, dtype=torch.int64, device=device)
        self.page_tables = torch.zeros(num_slots + 1, num_groups, max_pages, dtype=torch.int32, device=device)
        self.controls = new_controls(self.rows, vocab)
        self.history = torch.zeros(num_slots + 1, history_tokens, dtype=torch.int32, device=device)

    def load(self, load: SlotLoad) -> None:
        """Take in what comes beside the packet. Must be called on the stream, before the packet's step."""
        for name, array in load.arrays.items():
            self._send(getattr(self.controls, name)[load.slot], array)
        for table, pages in zip(self.page_tables[load.slot], load.pages):
            self._send(table, np.array(pages, np.int32))
        if load.block is not None:
            self._send(self.rows[load.slot, Column.BLOCK :], np.array([load.block], np.int64))
        if load.history is not None:
            self._send(self.history[load.slot], load.history)

    def _send(self, row: Tensor, array: Array) -> None:
        """Copy an array to the beginning of a row; the host does not wait."""
        host = self._backend.host(array.nbytes)
        host.numpy()[:] = array.reshape(-1).view(np.uint8)
        content = host.view(row.dtype)
        row.view(-1)[: len(content)].copy_(content, non_blocking=True)

    def column(self, column: Column) -> Tensor:
        """Return one value of every slot, [num_slots + 1], as a view."""
        return _column(self.rows, column)

    def row_params(self, slots: Tensor) -> RowParams:
        """Return the sampling parameters of the rows of logits whose slots these are."""
        rows = self.rows.index_select(0, slots)
        return RowParams(
            temperature=_column(rows, Column.TEMPERATURE),
            top_k=_column(rows, Column.TOP_K),
            top_p=_column(rows, Column.TOP_P),
            min_p=_column(rows, Column.MIN_P),
            seed=_column(rows, Column.SEED),
            token_index=_column(rows, Column.TOKEN_INDEX),
            min_left=_column(rows, Column.MIN_LEFT),
            stops=rows[:, Column.STOPS :],
        )


def _column(rows: Tensor, column: Column) -> Tensor:
    if column in (Column.TEMPERATURE, Column.TOP_P, Column.MIN_P):
        return rows.view(torch.float32)[:, 2 * column]
    return rows[:, column]
