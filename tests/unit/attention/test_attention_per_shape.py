"""`auto`: every call to the backend that is fastest at its shape, in graphs and eagerly."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from vitgraph.attention import per_shape
from vitgraph.attention.base import AttentionBackend
from vitgraph.attention.measure import AttentionCase, reference_attention
from vitgraph.attention.per_shape import CallShape, PerShapeBackend
from vitgraph.attention.torch_sdpa import TorchSdpaBackend
from vitgraph.errors import BackendError

CPU = torch.device("cpu")
HEADS, WIDTH = 2, 8


class ShortFake(TorchSdpaBackend):
    """Right, capturable, and said to be fast for short segments."""

    name: ClassVar[str] = "SHORT"
    is_capture_safe: ClassVar[bool] = True


class LongFake(ShortFake):
    name: ClassVar[str] = "LONG"


def cost(backend: AttentionBackend, case: AttentionCase, is_graph: bool) -> float:
    """SHORT takes 1 ms and 1 ms more for each hundred rows of a segment, LONG 4 ms whatever they are."""
    return 4.0 if backend.name == "LONG" else 1.0 + max(case.lengths) / 100


def auto(timer: per_shape.Timer = cost) -> PerShapeBackend:
    backends = {"SHORT": ShortFake(), "LONG": LongFake()}
    return PerShapeBackend(backends, HEADS, WIDTH, torch.float32, CPU, timer=timer)


def run(backend: PerShapeBackend, lengths: tuple[int, ...]) -> None:
    case = AttentionCase(HEADS, WIDTH, torch.float32, lengths)
    query, key, value = case.tensors(CPU)
    offsets = case.offsets(CPU)
    out = backend.varlen(query, key, value, offsets, max(lengths), WIDTH**-0.5)
    assert torch.allclose(out, reference_attention(query, key, value, offsets, WIDTH**-0.5), atol=1e-5)


@pytest.mark.parametrize(("lengths", "chosen"), [((64, 64), "SHORT"), ((1000,), "LONG"), ((1000, 20, 20), "LONG")])
def test_a_call_goes_to_the_backend_that_is_fastest_at_its_lengths(lengths: tuple[int, ...], chosen: str) -> None:
    backend = auto()
    run(backend, lengths)
    assert [row["backend"] for row in backend.choices()] == [chosen]
    assert backend.implementation == f"fastest at each shape of: {chosen}"


def test_near_shapes_share_one_timing_and_a_graph_has_its_own() -> None:
    backend = auto()
    for length in (1000, 1010, 1020):
        run(backend, (length,))
    assert len(backend.choices()) == 1
    with backend.graph_path():
        run(backend, (1000,))
    assert {row["is_graph"] for row in backend.choices()} == {False, True}


def test_a_graph_is_judged_by_the_segments_that_the_calls_will_bring() -> None:
    shape = CallShape(rows=1600, slots=8, longest=1600, is_graph=True)
    assert auto().backend_for(shape).name == "LONG"
    expecting = auto()
    expecting.expect({(400, 4, 100): 50, (1600, 1, 1600): 1})
    assert expecting.backend_for(shape).name == "SHORT"


def test_tiles_are_chosen_for_by_their_length() -> None:
    backend = auto()
    tiles = torch.randn(3, HEADS, 500, WIDTH)
    out = backend.dense(tiles, tiles, tiles, None, WIDTH**-0.5)
    wanted = torch.nn.functional.scaled_dot_product_attention(tiles, tiles, tiles).transpose(1, 2)
    assert torch.allclose(out, wanted, atol=1e-5)
    assert [(row["backend"], row["slots"]) for row in backend.choices()] == [("LONG", 4)]


def test_a_backend_that_fails_at_a_shape_is_left_out_there() -> None:
    def timer(backend: AttentionBackend, case: AttentionCase, is_graph: bool) -> float:
        if backend.name == "SHORT" and case.rows > 500:
            raise BackendError("no plan")
        return 1.0 if backend.name == "SHORT" else 2.0

    backend = auto(timer)
    assert backend.backend_for(CallShape(100, 1, 100, False)).name == "SHORT"
    assert backend.backend_for(CallShape(1000, 1, 1000, False)).name == "LONG"


def test_when_measuring_took_its_time_the_nearest_known_shape_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = auto()
    backend.prepare([(100, 1, 100), (4000, 1, 4000)])
    monkeypatch.setattr(per_shape, "MEASURE_LIMIT_S", -1.0)
    assert backend.backend_for(CallShape(3000, 2, 2900, False)).name == "LONG"
    assert backend.backend_for(CallShape(200, 2, 120, False)).name == "SHORT"
    assert [bool(row["milliseconds"]) for row in backend.choices()].count(True) == 2


def test_what_one_backend_alone_would_have_cost_is_said() -> None:
    backend = auto()
    assert backend.costs_ms() == {}
    calls = {(128, 2, 64): 10, (1024, 1, 1024): 5}
    backend.expect(calls)
    backend.prepare(calls)
    costs = backend.costs_ms()
    assert costs["auto"] < min(costs["SHORT"], costs["LONG"])
    assert "SHORT (segments of 64 to 64 rows), LONG (segments of 1024 to 1024 rows)" in str(backend)
    assert "with one backend alone: LONG 1." in str(backend)


def test_what_compiled_blocks_need_reaches_every_backend() -> None:
    backend = auto()
    backend.returns_fresh_output = True
    assert all(inner.returns_fresh_output for inner in backend._backends.values())
    with backend.graph_path(), backend.one_forward():
        assert all(inner.is_on_graph_path for inner in backend._backends.values())
        with backend.graph_path():
            pass
        assert backend.is_on_graph_path


class Leaving(ShortFake):
    """Leaves what the memory held in the rows past the last segment, as a kernel may that loads none of them."""

    name: ClassVar[str] = "SHORT"

    def varlen(self, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        out = super().varlen(query, *arguments)
        out[int(arguments[2][-1]) :] = float("nan")
        return out


class WholeTiles(LongFake):
    """Loads padded rows with the last tile: a NaN in them reaches every row."""

    def __init__(self) -> None:
        super().__init__()
        self.needs_finite_padding = True

    def varlen(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return super().varlen(query, key, value, *arguments) + 0 * value.sum()


def test_layers_of_one_graph_that_go_to_different_backends_leave_no_nan_to_one_another() -> None:
    """Windows with one backend and whole images with another: the second loads the padding that the first left."""
    backends = {"SHORT": Leaving(), "LONG": WholeTiles()}
    backend = PerShapeBackend(backends, HEADS, WIDTH, torch.float32, CPU, timer=cost)
    case = AttentionCase(HEADS, WIDTH, torch.float32, (64,) * 10, slots=20, padding_rows=100)
    query, key, value = case.tensors(CPU)
    windows = case.offsets(CPU)
    image = torch.tensor([0, 640, 640], dtype=torch.int32)
    with backend.graph_path():
        for _ in range(2):  # a warm-up, then what a capture would record
            hidden = backend.varlen(query, key, value, windows, 64, WIDTH**-0.5)
            hidden = backend.varlen(hidden, hidden, hidden, image, 740, WIDTH**-0.5)
    assert {row["backend"] for row in backend.choices()} == {"SHORT", "LONG"}
    assert bool(torch.isfinite(hidden[:640]).all())
