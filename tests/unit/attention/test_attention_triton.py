"""The Triton kernel: how heads are cut, which size class a call falls in, and its numbers in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from vitgraph.attention import triton_attn
from vitgraph.attention.measure import AttentionCase, reference_attention, relative_error
from vitgraph.attention.triton_attn import (
    LENGTH_CLASSES,
    ROW_CLASSES,
    Tile,
    TritonAttnBackend,
    TuningKey,
    candidate_tiles,
    chunk_widths,
)
from vitgraph.errors import BackendError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("width", "ways"),
    [
        (8, [(16, 0, 0)]),
        (64, [(64, 0, 0)]),
        (72, [(64, 16, 0), (128, 0, 0)]),
        (80, [(64, 16, 0), (128, 0, 0)]),
        (88, [(64, 32, 0), (128, 0, 0)]),
        (112, [(64, 32, 16), (64, 64, 0), (128, 0, 0)]),
        (128, [(128, 0, 0)]),
        (240, [(128, 128, 0), (256, 0, 0)]),
    ],
)
def test_heads_are_cut_into_powers_of_two(width: int, ways: list[tuple[int, int, int]]) -> None:
    assert chunk_widths(width) == ways


@pytest.mark.parametrize("width", range(8, 257, 8))
def test_every_width_is_covered_by_few_chunks_of_instruction_size(width: int) -> None:
    for way in chunk_widths(width):
        chunks = [chunk for chunk in way if chunk]
        assert sum(chunks) >= width
        assert sum(chunks[:-1]) < width
        assert all(chunk >= 16 and chunk & (chunk - 1) == 0 for chunk in chunks)
    assert sum(chunk_widths(width)[0]) - width < 16 or width > 128


def test_the_size_class_is_near_the_call_and_unknown_lengths_make_no_new_ones() -> None:
    classes = {length: triton_attn._class_of(length, LENGTH_CLASSES) for length in (1, 127, 128, 881, 882, 90_000)}
    assert classes == {1: 64, 127: 64, 128: 441, 881: 441, 882: 3072, 90_000: 3072}
    assert triton_attn._class_of(100_000, ROW_CLASSES) == 8192


def test_a_class_is_measured_with_segments_of_its_length() -> None:
    key = TuningKey(CPU, torch.bfloat16, 16, 72, 441, 3072)
    assert key.case.lengths == (441,) * 7
    assert TuningKey(CPU, torch.bfloat16, 16, 72, 3072, 512).case.lengths == (512,)


@pytest.mark.parametrize("width", range(8, 257, 8))
def test_a_head_in_several_chunks_is_never_given_a_tail_of_its_own(width: int) -> None:
    tiles = candidate_tiles(width)
    assert tiles
    assert not [tile for tile in tiles if tile.widths[1] and tile.split_tail]


def test_a_tile_that_is_wrong_is_never_chosen_and_none_left_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(triton_attn, "_AGREES", {})
    key = TuningKey(CPU, torch.float32, 2, 72, 64, 512)
    good, *bad = candidate_tiles(72)

    def launch(_: TritonAttnBackend, tile: Tile, *arguments: Any) -> None:
        query, value_key, value, out, offsets, scale = arguments
        rows = int(offsets[-1])
        out[:rows] = reference_attention(query, value_key, value, offsets, scale)[:rows]
        if tile in bad:
            out[rows - 1] += 1.0

    monkeypatch.setattr(TritonAttnBackend, "_launch", launch)
    monkeypatch.setattr(TritonAttnBackend, "_compile_together", lambda *_: None)
    assert list(TritonAttnBackend(CPU)._measure_tiles(key)) == [good]
    bad.append(good)
    monkeypatch.setattr(triton_attn, "_AGREES", {})
    with pytest.raises(BackendError, match="no tile of TRITON_ATTN is right for head width 72"):
        TritonAttnBackend(CPU)._measure_tiles(key)


def test_on_a_cpu_it_says_how_it_could_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "needs a GPU, this is cpu" in str(TritonAttnBackend.unavailable_reason(CPU))


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "pip install triton" in str(TritonAttnBackend.unavailable_reason(CPU))


# -- in Triton's interpreter -------------------------------------------------------------------------------------------


# Triton decides when it is imported whether it interprets, so these tests run in a process of their own.

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(IS_INTERPRETED, reason="this is the interpreting process")
def test_the_kernel_is_right_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed; its interpreter runs the kernel on a CPU")
    try:
        int(np.zeros(1))
    except TypeError:
        pytest.skip(f"Triton's interpreter does not run on NumPy {np.__version__}")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    progress = result.stdout.splitlines()[0].split()[0]
    assert set(progress) == {"."}, f"not every interpreted test ran: {progress}"


@pytest.fixture
def interpreted() -> TritonAttnBackend:
    """The backend with a kernel that the interpreter runs."""
    if not IS_INTERPRETED:
        pytest.skip("runs in the process that test_the_kernel_is_right_in_tritons_interpreter starts")
    assert TritonAttnBackend.unavailable_reason(CPU) is None
    return TritonAttnBackend(CPU)


RAGGED = (5, 0, 70, 64, 1, 0)


@pytest.mark.parametrize("split_tail", [True, False])
@pytest.mark.parametrize("way", [(width, way) for width in (72, 112) for way in chunk_widths(width)])
def test_interpreted_ragged_segments_are_right_and_nan_padding_reaches_nothing(
    way: tuple[int, tuple[int, int, int]], split_tail: bool, interpreted: TritonAttnBackend
) -> None:
    width, widths = way
    case = AttentionCase(2, width, torch.float16, RAGGED, slots=9, padding_rows=20)
    query, key, value = case.tensors(CPU)
    value = torch.stack((value, value, value), dim=1)[:, 2]
    offsets = case.offsets(CPU)
    end = int(offsets[-1])
    for tensor in (query, key, value):
        tensor[end:] = float("nan")
    out = torch.full(query.shape, 7.0, dtype=torch.float16)
    interpreted._launch(Tile(32, 32, 4, 2, widths, split_tail), query, key, value, out, offsets, 0.2)
    expected = reference_attention(query, key, value, offsets, 0.2, torch.float64)
    assert relative_error(out, expected, offsets) < 5e-4
    assert (out[end:] == 7).all()


def test_interpreted_views_that_cannot_be_loaded_wide_are_copied_first(interpreted: TritonAttnBackend) -> None:
    case = AttentionCase(2, 24, torch.float16, (9, 40))
    query, key, value = case.tensors(CPU)
    odd = torch.zeros(case.rows * 2 * 24 + 1, dtype=torch.float16)[1:].view(query.shape).copy_(key)
    every_other = torch.stack((value, value), dim=3).flatten(2)[:, :, ::2]
    offsets = case.offsets(CPU)
    out = interpreted.varlen(query, odd, every_other, offsets, 40, 24**-0.5)
    expected = reference_attention(query, odd, every_other, offsets, 24**-0.5, torch.float64)
    assert relative_error(out, expected, offsets) < 5e-4


def test_interpreted_kernels_measure_no_tiles(interpreted: TritonAttnBackend) -> None:
    assert interpreted._tile((CPU, torch.float16, 2, 72), 100, 50) == candidate_tiles(72)[0]
    assert interpreted.implementation.endswith("interpreted")
    assert interpreted.plan_build_ms == 0


@pytest.mark.parametrize(("ends", "rows"), [((0, 100), 300), ((0, 64, 128, 128), 128), ((0, 0), 70), ((0, 63), 65)])
def test_interpreted_rows_past_the_last_segment_are_zeroed_and_no_other(
    ends: tuple[int, ...], rows: int, interpreted: TritonAttnBackend
) -> None:
    from vitgraph.attention.triton_kernel import zero_tail

    out = torch.full((rows, 2, 300), float("nan"), dtype=torch.float16)
    out[: ends[-1]] = 7
    zero_tail(out, torch.tensor(ends, dtype=torch.int32))
    assert (out[: ends[-1]] == 7).all()
    assert not out[ends[-1] :].any()


def test_interpreted_tail_of_nothing(interpreted: TritonAttnBackend) -> None:
    from vitgraph.attention.triton_kernel import zero_tail

    assert zero_tail(torch.empty(0, 2, 8), torch.zeros(2, dtype=torch.int32)).shape == (0, 2, 8)
