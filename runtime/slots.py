"""Batch slots: what the device knows of each running sequence, so that a step needs no answer of the step before.

The host sends differences (``runtime.packet``); the tokens of decodes, their positions and whether they still run are
here. ``treadle::begin_step`` and ``treadle::end_step`` change them, on the stream, in launch order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.graph.packet import SLOT_WIDTH, Column
from treadle.runtime.sampler import RowParams


class Slots:
    """Device arrays over ``num_slots`` sequences; the host never reads them.

    One slot more belongs to nobody: it is never active, all its pages are the scratch page, and padding points at it.
    Shapes: rows [num_slots + 1, SLOT_WIDTH] int64; page_table [num_slots + 1, max_pages] int32.
    """

    def __init__(self, num_slots: int, max_pages: int, device: str) -> None:
        self.nobody = num_slots
        self.rows = torch.zeros(num_slots + 1, SLOT_WIDTH, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(num_slots + 1, max_pages, dtype=torch.int32, device=device)

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
