"""Endpoints and finite padded rows: one helper for eager, capture and replay."""

from __future__ import annotations

import pytest
import torch

from vitgraph.attention.padding import (
    GraphOutputs,
    segment_endpoints,
    zero_rows_past_end,
)
from vitgraph.errors import BackendError


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("given", [[0, 64, 64, 64, 64], offsets(0, 64, 64, 64, 64)])
def test_endpoints_leave_empty_segments_out_and_end_at_the_rows(given: list[int] | torch.Tensor) -> None:
    assert segment_endpoints(given, rows=64) == [64]


def test_endpoints_keep_empty_segments_between_others_out() -> None:
    assert segment_endpoints([0, 0, 3, 3, 10, 10], rows=12) == [3, 10]


def test_no_segments_have_no_endpoints() -> None:
    assert segment_endpoints([0, 0, 0], rows=0) == []


@pytest.mark.parametrize(
    ("given", "rows", "message"),
    [
        ([0, 5, 3], 8, "3 follows 5"),
        ([1, 5], 8, "must start with 0"),
        ([], 8, "must start with 0"),
        ([0, 5, 9], 8, "ends at row 9 of 8"),
    ],
)
def test_offsets_that_no_packing_gives_are_refused(given: list[int], rows: int, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        segment_endpoints(given, rows)


def test_rows_past_the_end_become_zero_whatever_they_held() -> None:
    out = torch.full((4, 1, 2), float("nan"))
    out[:2] = 7
    zero_rows_past_end(out, offsets(0, 1, 2, 2))
    assert out[:, 0, 0].tolist() == [7, 7, 0, 0]


def test_outputs_of_equal_heads_share_one_buffer_that_starts_as_zeros() -> None:
    outputs = GraphOutputs()
    outputs.reserve(10)
    large, small = outputs.take(torch.empty(8, 2, 4)), outputs.take(torch.empty(3, 2, 4))
    assert large.shape == (8, 2, 4)
    assert not large.any()
    assert small.data_ptr() == large.data_ptr()
    assert outputs.take(torch.empty(8, 2, 8)).data_ptr() != large.data_ptr()


def test_a_buffer_that_became_too_small_lives_on_for_the_graphs_that_write_to_it() -> None:
    outputs = GraphOutputs()
    first = outputs.take(torch.empty(4, 1, 8))
    address = first.data_ptr()
    del first
    grown = outputs.take(torch.empty(9, 1, 8))
    assert grown.shape[0] == 9
    assert outputs._outgrown[0].data_ptr() == address
    outputs.release()
    assert not outputs._outgrown
