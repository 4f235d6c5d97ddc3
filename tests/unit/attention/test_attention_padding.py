"""Lengths, offsets and endpoints that backends derive: one helper for eager, capture and replay."""

from __future__ import annotations

import pytest
import torch

from vitgraph.attention.padding import (
    PaddingSafeOutputs,
    bucketed_seqlen,
    bucketed_slots,
    packed_sections,
    padded_offsets,
    segment_endpoints,
    zero_rows_past_end,
)
from vitgraph.errors import BackendError


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("slots", "bucket"),
    [(0, 8), (3, 8), (8, 8), (9, 16), (16, 16), (17, 64), (64, 64), (65, 128), (128, 128), (129, 192)],
)
def test_slots_go_to_the_next_bucket_and_above_64_to_multiples_of_it(slots: int, bucket: int) -> None:
    assert bucketed_slots(slots) == bucket


@pytest.mark.parametrize(("longest", "bound"), [(0, 256), (1, 256), (256, 256), (257, 512), (3072, 4096), (4096, 4096)])
def test_length_bounds_are_powers_of_two(longest: int, bound: int) -> None:
    assert bucketed_seqlen(longest) == bound


def test_every_section_is_padded_with_its_own_last_value_and_unused_slots_have_no_rows() -> None:
    """Query and value of a fused projection have different row strides; three items in a bucket of eight."""
    sections = packed_sections(offsets(0, 4, 10, 18), 8, (1152, 3456, 1152), rows=18)
    assert sections.lengths.tolist() == [4, 6, 8, 0, 0, 0, 0, 0]
    assert {stride: section.tolist() for stride, section in sections.offsets.items()} == {
        1152: [0, 4608, 11520] + [20736] * 6,
        3456: [0, 13824, 34560] + [62208] * 6,
    }
    assert sections.lengths.dtype == torch.int32


def test_offsets_that_fill_their_slots_are_not_copied() -> None:
    full = offsets(0, 1, 2, 3, 4, 5, 6, 7, 8)
    assert padded_offsets(full, 8) is full


def test_more_segments_than_slots_are_refused() -> None:
    with pytest.raises(BackendError, match="9 segments do not fit 8 slots"):
        padded_offsets(torch.arange(10, dtype=torch.int32), 8)


def test_offsets_beyond_32_bits_are_refused_and_not_wrapped() -> None:
    with pytest.raises(BackendError, match="above 32 bits"):
        packed_sections(offsets(0, 700_000), 8, (3456,), rows=700_000)


def test_sections_follow_offsets_that_change_under_the_same_tensor() -> None:
    """Equal totals with other boundaries: nothing of the first call may be left."""
    static = offsets(0, 4, 10, 18)
    packed_sections(static, 8, (2,), rows=18)
    static.copy_(offsets(0, 5, 10, 18))
    changed = packed_sections(static, 8, (2,), rows=18)
    assert changed.lengths.tolist()[:3] == [5, 5, 8]
    assert changed.offsets[2].tolist()[:4] == [0, 10, 20, 36]


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
    outputs = PaddingSafeOutputs()
    outputs.reserve(10)
    large, small = outputs.take(torch.empty(8, 2, 4)), outputs.take(torch.empty(3, 2, 4))
    assert large.shape == (8, 2, 4)
    assert not large.any()
    assert small.data_ptr() == large.data_ptr()
    assert outputs.take(torch.empty(8, 2, 8)).data_ptr() != large.data_ptr()


def test_a_buffer_that_became_too_small_lives_on_for_the_graphs_that_write_to_it() -> None:
    outputs = PaddingSafeOutputs()
    first = outputs.take(torch.empty(4, 1, 8))
    address = first.data_ptr()
    del first
    grown = outputs.take(torch.empty(9, 1, 8))
    assert grown.shape[0] == 9
    assert outputs._outgrown[0].data_ptr() == address
    outputs.release()
    assert not outputs._outgrown
