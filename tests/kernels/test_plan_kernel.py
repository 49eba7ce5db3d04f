"""The plan of a step on the device is that of the definition in plain ints."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from forms import Kernels

from cuda_ext.backend.step_plan import plan_step_torch
from cuda_ext.cursor import LOST, NULL_SLOT, plan_row
from cuda_ext.ops.cursor import plan_step

SLOTS, MAX_ROWS, PADDING = 400, 4, -77
FORMS = pytest.mark.parametrize("plan", [plan_step, plan_step_torch], ids=["kernel", "torch"])


def batch(requests: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Pages, lengths and row starts of a random batch with padding, idle requests and chunks."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, count: int) -> torch.Tensor:
        return torch.randint(0, high, (count,), generator=generator)

    pages = torch.randperm(SLOTS - 1, generator=generator)[:requests] + 1
    pages[draw(5, requests) == 0] = NULL_SLOT
    rows = draw(MAX_ROWS + 3, requests)
    seq_lens = rows + draw(3, requests) * draw(100, requests)
    row_start = torch.cat((torch.zeros(1, dtype=torch.long), rows.cumsum(0)))
    return pages.int(), seq_lens.int(), row_start.int()


def buffers(requests: int, device: str) -> list[torch.Tensor]:
    """Static buffers, longer than the batch and full of something else."""
    return [
        torch.full((requests + extra,), PADDING, dtype=torch.int32, device=device)
        for extra in (3, 3, 3, 4)
    ]


@FORMS
@pytest.mark.parametrize("requests", [1, 5, 127, 128, 129, 300])
def test_the_plan_is_that_of_the_definition(
    kernels: Kernels, plan: Callable[..., None], requests: int
) -> None:
    device = kernels.device
    pages, seq_lens, row_start = batch(requests, requests)
    cursor = torch.randint(0, 50, (SLOTS,), dtype=torch.int32)
    # Most slots cover what their request needs; some a row too many, or too few.
    starts = seq_lens - row_start.diff()
    cursor[pages] = starts - torch.arange(requests, dtype=torch.int32) % (MAX_ROWS + 3) + 1
    cursor[NULL_SLOT] = 0
    lost = 0
    table = torch.full((requests, 3), 9, dtype=torch.int32)
    table[:, 0] = pages
    slot, base, start, out_row_start = out = buffers(requests, device)
    moved = cursor.clone().to(device)
    plan(table.to(device), seq_lens.to(device), row_start.to(device), moved, MAX_ROWS, *out)
    wanted = cursor.clone()
    for i in range(requests):
        row = plan_row(
            slot=int(pages[i]),
            seq_len=int(seq_lens[i]),
            rows=int(row_start[i + 1] - row_start[i]),
            cursor=int(cursor[pages[i]]),
            max_rows=MAX_ROWS,
        )
        assert (int(slot[i]), int(base[i]), int(start[i])) == (row.slot, row.base, row.start), i
        if row.slot != NULL_SLOT:
            wanted[row.slot] = row.covered
            lost += row.covered == LOST
    assert torch.equal(out_row_start[: requests + 1].cpu(), row_start)
    assert torch.equal(moved.cpu(), wanted)
    assert requests < 100 or 0 < lost < requests // 2
    for buffer, used in zip(out, (requests, requests, requests, requests + 1), strict=True):
        assert (buffer[used:] == PADDING).all()


@FORMS
def test_an_inert_plan_moves_no_cursor(kernels: Kernels, plan: Callable[..., None]) -> None:
    device = kernels.device
    pages, seq_lens, row_start = (x.to(device) for x in batch(9, 0))
    cursor = torch.randint(0, 50, (SLOTS,), dtype=torch.int32).to(device)
    kept = cursor.clone()
    out = buffers(9, device)
    plan(pages, seq_lens, row_start, cursor, MAX_ROWS, *out, inert=True)
    assert torch.equal(cursor, kept)
    assert all((buffer[:9] == 0).all() for buffer in out[:3])
    assert torch.equal(out[3][:10], row_start)
