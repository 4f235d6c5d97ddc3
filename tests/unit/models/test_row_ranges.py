"""Row ranges of packed tensors: merged, gathered and scattered as slices would be, whatever their order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from vitgraph.models.base import RowRanges

CASES: list[tuple[Sequence[tuple[int, int]], tuple[tuple[int, int], ...]]] = [
    ([], ()),
    ([(2, 2)], ()),
    ([(0, 3)], ((0, 3),)),
    ([(0, 3), (3, 7)], ((0, 7),)),
    ([(1, 3), (3, 3), (5, 9)], ((1, 3), (5, 9))),
    ([(5, 9), (1, 3)], ((5, 9), (1, 3))),
    ([(0, 2), (4, 6), (8, 10)], ((0, 2), (4, 6), (8, 10))),
]


@pytest.mark.parametrize(("given", "merged"), CASES)
def test_gather_and_scatter_are_what_slices_give(given: Sequence[tuple[int, int]], merged: tuple[object, ...]) -> None:
    rows = RowRanges(given)
    assert rows.ranges == merged
    source = torch.arange(30).view(10, 3)
    expected = torch.cat([source[:0], *(source[start:stop] for start, stop in given)])
    assert rows.total == len(expected)
    gathered = torch.full((12, 3), -1)
    rows.gather(source, gathered)
    assert torch.equal(gathered[: rows.total], expected)
    assert bool((gathered[rows.total :] == -1).all())
    scattered = torch.full((10, 3), -1)
    rows.scatter(gathered, scattered)
    for start, stop in given:
        assert torch.equal(scattered[start:stop], source[start:stop])
    assert int((scattered[:, 0] == -1).sum()) == 10 - rows.total
