"""`auto`: every call to the backend that is fastest at its shape, in graphs and eagerly."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest
import torch

from vitgraph.attention import per_shape
from vitgraph.attention.base import AttentionBackend, GraphContents, Packed, TorchSdpaBackend
from vitgraph.attention.measure import AttentionCase, CallShape, reference_attention
from vitgraph.attention.per_shape import PerShapeBackend, Trial
from vitgraph.errors import BackendError
from vitgraph.records.sections import AttentionChoice, best_alone, choices_text, costs_ms

CPU = torch.device("cpu")
HEADS, WIDTH = 2, 8


class ShortFake(TorchSdpaBackend):
    """Right, capturable, and said to be fast for short segments."""

    name: ClassVar[str] = "SHORT"
    is_capture_safe: ClassVar[bool] = True


class LongFake(ShortFake):
    name: ClassVar[str] = "LONG"


def cost(backend: AttentionBackend, arguments: Packed, is_graph: bool) -> Trial:
    """SHORT takes 1 ms and 1 ms more for each hundred rows of a segment, LONG 4 ms whatever they are."""
    longest = float(arguments[3].diff().max())
    return trial(0.0, 4.0 if backend.name == "LONG" else 1.0 + longest / 100)


def trial(host_ms: float, device_ms: float) -> Trial:
    return Trial(device_ms, lambda: lambda: (host_ms, device_ms))


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


def graph_of(rows: int, slots: int = 1) -> CallShape:
    return CallShape(rows, slots, rows, True)


def test_a_graph_is_judged_by_what_its_own_replays_will_hold() -> None:
    """Smaller calls, however many, go to smaller graphs: what those bring says nothing of this one."""
    assert auto().backend_for(graph_of(1600)).name == "LONG"
    backend = auto()
    replays = [GraphContents(1, 400, {(250,): 5000, (100,): 9}), GraphContents(1, 1600, {(500,): 3, (1500,): 1})]
    backend.expect({}, replays)
    assert backend.backend_for(graph_of(400)).name == "SHORT"
    assert backend.backend_for(graph_of(1600)).name == "LONG", "3 x 6 and 16 ms against 4 x 4"
    assert [row["calls"] for row in backend.choices()] == [5009, 4]
    assert backend.choices()[1]["milliseconds"]["SHORT"] == pytest.approx((3 * 6 + 16) / 4)


def test_no_time_is_spent_on_graphs_that_no_call_will_replay() -> None:
    backend = auto()
    backend.expect({}, [GraphContents(1, 400, {(250,): 5})])
    assert backend.backend_for(graph_of(1600)).name == "SHORT", "as nothing is known yet, the first"
    backend.backend_for(graph_of(400))
    assert [bool(row["milliseconds"]) for row in backend.choices()] == [True, False]


def test_graphs_with_the_same_slots_are_told_apart_by_their_rows() -> None:
    """Windows of one length have as many slots in two budgets."""
    backend = auto()
    backend.expect({}, [GraphContents(9, 64, {(64,) * 3: 2}), GraphContents(9, 64, {(64,) * 9: 7})])
    backend.backend_for(CallShape(192, 9, 64, True))
    backend.backend_for(CallShape(576, 9, 64, True))
    assert [row["calls"] for row in backend.choices()] == [2, 7]


def test_a_graph_is_timed_with_the_bound_slots_and_rows_that_it_will_have() -> None:
    seen: list[Packed] = []

    def timer(backend: AttentionBackend, arguments: Packed, is_graph: bool) -> Trial:
        seen.append(arguments)
        return trial(0.0, 1.0)

    backend = auto(timer)
    backend.expect({}, [GraphContents(4, 900, {(300, 200): 1})])
    backend.backend_for(CallShape(1000, 4, 900, True))
    query, _, _, offsets, longest, _ = seen[0]
    assert (len(query), offsets.tolist(), longest) == (1000, [0, 300, 500, 500, 500], 900)
    assert all(arguments is seen[0] for arguments in seen), "all backends get the same tensors"


@pytest.mark.parametrize(("times", "taken"), [((1.0, 0.995), "SHORT"), ((1.0, 0.9), "LONG"), ((0.9, 1.0), "SHORT")])
def test_the_first_of_those_that_are_equally_fast_is_taken(times: tuple[float, float], taken: str) -> None:
    backend = auto(lambda backend, arguments, is_graph: trial(0.0, times[backend.name == "LONG"]))
    assert backend.backend_for(graph_of(64)).name == taken


@pytest.mark.parametrize(
    ("shorter_ms", "longer_ms", "order"),
    [
        (0.01, 0.09, [*["SHORT", "LONG"], *["SHORT"] * (per_shape.ROUNDS - 1)]),
        (40.0, 97.0, ["SHORT"] * per_shape.LONG_ROUNDS),
        (40.0, 50.0, ["SHORT", "LONG"] * per_shape.LONG_ROUNDS),
    ],
)
def test_backends_are_read_in_turns_and_hopeless_ones_once(
    shorter_ms: float, longer_ms: float, order: list[str]
) -> None:
    """Long calls are not even read once where the first showed that another takes far less."""
    read: list[str] = []

    def timer(backend: AttentionBackend, arguments: Packed, is_graph: bool) -> Trial:
        taken = longer_ms if backend.name == "LONG" else shorter_ms

        def reading() -> tuple[float, float]:
            read.append(backend.name)
            return 0.0, taken

        return Trial(taken, lambda: reading)

    backend = auto(timer)
    assert backend.backend_for(graph_of(64)).name == "SHORT"
    assert read == order
    assert backend.choices()[0]["milliseconds"] == {"SHORT": shorter_ms, "LONG": longer_ms}


def test_eager_calls_are_judged_by_what_the_rest_of_a_layer_leaves_of_their_time() -> None:
    """Where the host is slower than the GPU a backend that is launched sooner is taken, else the one that is faster."""
    times = {"SHORT": (0.05, 0.09), "LONG": (0.08, 0.07)}
    shape = CallShape(2000, 1, 2000, False)
    alone = auto(lambda backend, arguments, is_graph: trial(*times[backend.name]))
    assert alone.backend_for(shape).name == "LONG"
    backend = auto(lambda backend, arguments, is_graph: trial(*times[backend.name]))
    tensors = torch.zeros(4, HEADS, WIDTH)
    offsets = torch.tensor([0, 4], dtype=torch.int32)

    def forward(seconds: float) -> None:
        for _ in range(2):
            backend.varlen(tensors, tensors, tensors, offsets, 4, 1.0)
        time.sleep(seconds)

    backend.learn_layer(lambda: forward(0.02), lambda: forward(0.002), rows=20000)
    assert not backend.choices(), "attention was left out"
    assert backend.backend_for(shape).name == "SHORT"
    backend.learn_layer(lambda: forward(0.002), lambda: forward(0.2), rows=2000)
    assert backend.backend_for(shape).name == "LONG", "it is judged anew"


def test_tiles_are_chosen_for_by_their_length() -> None:
    backend = auto()
    tiles = torch.randn(3, HEADS, 500, WIDTH)
    out = backend.dense(tiles, tiles, tiles, None, WIDTH**-0.5)
    wanted = torch.nn.functional.scaled_dot_product_attention(tiles, tiles, tiles).transpose(1, 2)
    assert torch.allclose(out, wanted, atol=1e-5)
    assert [(row["backend"], row["slots"]) for row in backend.choices()] == [("LONG", 4)]


def test_a_backend_that_fails_at_a_shape_is_left_out_there() -> None:
    def timer(backend: AttentionBackend, arguments: Packed, is_graph: bool) -> Trial:
        if backend.name == "SHORT" and len(arguments[0]) > 500:
            raise BackendError("no plan")
        return trial(0.0, 1.0 if backend.name == "SHORT" else 2.0)

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
    replays = [GraphContents(1, 512, {(64,): 8}), GraphContents(1, 2048, {(1024,): 2})]
    backend.expect({(64, 64): 10, (1024,): 5}, replays)
    backend.prepare([(128, 2, 64), (1024, 1, 1024)])
    for rows in (512, 2048):
        backend.backend_for(graph_of(rows))
    choices = [AttentionChoice.model_validate(row) for row in backend.choices()]
    assert costs_ms(choices, is_graph=False) == pytest.approx(
        {"SHORT": 10 * 1.64 + 5 * 11.24, "LONG": 60, "auto": 36.4}
    )
    assert costs_ms(choices, is_graph=True) == pytest.approx({"SHORT": 8 * 1.64 + 2 * 11.24, "LONG": 40, "auto": 21.12})
    assert best_alone(choices) == "SHORT"
    assert choices_text(choices) == (
        "graphs: SHORT at 512 rows, LONG at 2,048 rows (one backend alone: SHORT 1.69x, LONG 1.89x); "
        "eager calls: SHORT at 128 rows, LONG at 1,024 rows (one backend alone: LONG 1.65x, SHORT 1.99x)"
    )


def test_a_layer_of_a_call_that_was_met_before_only_looks_its_backend_up(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = auto()
    run(backend, (300,))
    monkeypatch.setattr(PerShapeBackend, "backend_for", lambda *_: pytest.fail("it was resolved in the first layer"))
    run(backend, (300,))


def test_what_compiled_blocks_need_reaches_every_backend() -> None:
    backend = auto()
    backend.outputs.are_fresh = True
    assert all(inner.outputs.are_fresh for inner in backend._backends.values())
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
