"""Every attention backend that can run here: eager, captured, replayed with other offsets, and from a poisoned pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vitgraph.attention.base import AttentionBackend
from vitgraph.attention.flash_attn import TILES, installed_generations
from vitgraph.attention.measure import AttentionCase, capture_calls, reference_attention, relative_error
from vitgraph.attention.per_shape import CLOSE, PerShapeBackend
from vitgraph.attention.registry import BACKENDS, backend_class, create_backend
from vitgraph.records.sections import AttentionChoice, costs_ms

pytestmark = [
    pytest.mark.requires_cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS = 4
DTYPE = torch.bfloat16
WIDTHS = (64, 72, 80, 88, 112, 128)
RAGGED = (1, 0, 17, 400, 0, 129, 64, 3)
TOLERANCE = 1e-2
LAYERS = 3


def device() -> torch.device:
    return torch.device("cuda", 0)


def implementations() -> list[tuple[str, int | None]]:
    """Name and variant of everything that might run on some GPU."""
    flash = [("FLASH_ATTN", variant) for variant in (None, "2", "3", "4", *(f"4:{tile}" for tile in TILES))]
    return [*flash, ("FLASHINFER", None), ("TRITON_ATTN", None)]


@pytest.fixture(params=implementations(), ids=lambda one: f"{one[0]}{one[1] or ''}")
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """One backend, skipped with its reason where it cannot run."""
    name, variant = request.param
    chosen = backend_class(name)
    reason = chosen.unavailable_reason(device())
    if reason is None and variant is not None and variant not in (*chosen.variants(device()), "4"):
        reason = f"{variant} does not run here"
    if reason is None and variant == "4" and 4 not in installed_generations(device()):
        reason = "generation 4 is not installed"
    if reason is not None:
        pytest.skip(reason)
    return chosen.for_device(device(), variant)


Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def poisoned(case: AttentionCase, with_: float) -> Packed:
    """Query, key and value whose padded rows hold `with_`."""
    tensors = case.tensors(device())
    for tensor in tensors:
        tensor[sum(case.lengths) :] = with_
    return tensors


@pytest.mark.parametrize("width", WIDTHS)
def test_ragged_segments_are_right_beside_stale_padding(width: int, backend: AttentionBackend) -> None:
    case = AttentionCase(HEADS, width, DTYPE, RAGGED, slots=12, padding_rows=70)
    tensors = poisoned(case, 1e4 if backend.needs_finite_padding else float("nan"))
    offsets = case.offsets(device())
    out = backend.varlen(*tensors, offsets, 400, width**-0.5)
    expected = reference_attention(*tensors, offsets, width**-0.5, torch.float64)
    assert relative_error(out, expected, offsets) < TOLERANCE


def test_views_of_a_fused_projection_and_a_second_scale_are_right(backend: AttentionBackend) -> None:
    case = AttentionCase(HEADS, 72, DTYPE, (40, 300))
    fused = torch.stack(case.tensors(device()), dim=1)
    views: Packed = (fused[:, 0], fused[:, 1], fused[:, 2])
    packed: Packed = (views[0].contiguous(), views[1].contiguous(), views[2].contiguous())
    offsets = case.offsets(device())
    for tensors in (packed, views, (packed[0], packed[1], views[2]), packed):
        for scale in (72**-0.5, 0.05):
            out = backend.varlen(*tensors, offsets, 300, scale)
            expected = reference_attention(*packed, offsets, scale)
            assert relative_error(out, expected, offsets) < TOLERANCE


@pytest.mark.parametrize("width", [72, 128])
def test_a_replay_follows_offsets_that_changed_since_the_capture(width: int, backend: AttentionBackend) -> None:
    rows, slots = 640, 8
    query, key, value = AttentionCase(HEADS, width, DTYPE, (rows,)).tensors(device())
    offsets = torch.tensor([0, *[rows] * slots], dtype=torch.int32, device=device())
    outputs: list[torch.Tensor] = []

    def call() -> None:
        outputs.append(backend.varlen(query, key, value, offsets, rows, width**-0.5))

    graph = capture_calls(backend, call, 1)
    for lengths in ((64,), (300, 200), (rows,), (1, 0, 5, 0, 400), (64,)):
        case = AttentionCase(HEADS, width, DTYPE, lengths, slots=slots, padding_rows=rows - sum(lengths))
        fresh = poisoned(case, 1e4 if backend.needs_finite_padding else float("nan"))
        for static, new in zip((query, key, value), fresh, strict=True):
            static.copy_(new)
        offsets.copy_(case.offsets(device()))
        graph.replay()
        expected = reference_attention(query, key, value, offsets, width**-0.5)
        assert relative_error(outputs[-1], expected, offsets) < TOLERANCE, lengths


class Tower:
    """A few attention layers with residuals: what one layer leaves in padded rows is the next one's input."""

    def __init__(self, backend: AttentionBackend, rows: int, slots: int) -> None:
        self.backend, self.rows, self.slots = backend, rows, slots
        self.hidden = torch.zeros(rows, HEADS, 72, dtype=DTYPE, device=device())
        self.offsets = torch.tensor([0, *[rows] * slots], dtype=torch.int32, device=device())
        self.out = torch.zeros_like(self.hidden)

    def forward(self) -> None:
        self.out.copy_(layers(self.backend, self.hidden, self.offsets, self.rows))

    def capture(self, pool: Any) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with self.backend.graph_path():
            with torch.cuda.stream(stream):
                self.forward()
            stream.synchronize()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self.forward()
        return graph

    def load(self, lengths: tuple[int, ...], hidden: torch.Tensor) -> None:
        case = AttentionCase(HEADS, 72, DTYPE, lengths, slots=self.slots)
        self.offsets.copy_(case.offsets(device()))
        self.hidden[: len(hidden)].copy_(hidden)
        self.hidden[len(hidden) :].zero_()


def layers(backend: AttentionBackend, hidden: torch.Tensor, offsets: torch.Tensor, longest: int) -> torch.Tensor:
    with backend.one_forward():
        for _ in range(LAYERS):
            hidden = hidden + backend.varlen(hidden, hidden, hidden * 0.5, offsets, longest, 72**-0.5)
    return hidden


def poison_pool(pool: Any, megabytes: int = 64) -> torch.cuda.CUDAGraph:
    """A graph of the pool that fills much of it with NaN when it is replayed; later captures reuse that memory."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        torch.full((megabytes << 19,), float("nan"), dtype=DTYPE, device=device())
    return graph


def test_small_large_small_in_one_poisoned_pool_equal_eager(backend: AttentionBackend) -> None:
    """Upstream, a large image came out as NaN from a pool that several budgets shared, and a small one did not."""
    pool = torch.cuda.graph_pool_handle()
    poison = poison_pool(pool)
    poison.replay()
    backend.outputs.reserve(2048)
    towers = {rows: Tower(backend, rows, 4) for rows in (2048, 512, 256)}
    graphs = {rows: tower.capture(pool) for rows, tower in towers.items()}
    pointers = {rows: (tower.hidden.data_ptr(), tower.offsets.data_ptr()) for rows, tower in towers.items()}
    results = []
    for rows, lengths in ((256, (100,)), (2048, (1196,)), (512, (300, 100)), (256, (100,))):
        generator = torch.Generator(device()).manual_seed(sum(lengths))
        hidden = torch.randn(sum(lengths), HEADS, 72, generator=generator, device=device()).to(DTYPE)
        poison.replay()
        towers[rows].load(lengths, hidden)
        graphs[rows].replay()
        actual = towers[rows].out[: len(hidden)].clone()
        eager = layers(backend, hidden, AttentionCase(HEADS, 72, DTYPE, lengths).offsets(device()), max(lengths))
        assert bool(torch.isfinite(actual).all()), f"{rows} rows"
        assert torch.linalg.vector_norm((actual - eager).float()) < TOLERANCE * torch.linalg.vector_norm(eager.float())
        results.append(actual)
    assert torch.equal(results[0], results[-1])
    assert pointers == {rows: (tower.hidden.data_ptr(), tower.offsets.data_ptr()) for rows, tower in towers.items()}
    backend.outputs.release()


def test_auto_takes_the_fastest_at_each_shape_and_records_what_it_tried() -> None:
    backend = create_backend("auto", device(), head_width=72, heads=HEADS, dtype=DTYPE)
    assert isinstance(backend, PerShapeBackend)
    assert {record["name"] for record in backend.selection} == set(BACKENDS)
    usable = {record["name"] for record in backend.selection if record["status"] == "ok"}
    assert all(record["reason"] for record in backend.selection if record["status"] != "ok")
    backend.expect({(64,): 10, (12288,): 10})
    backend.prepare([(64, 1, 64), (12288, 1, 12288)])
    for row in backend.choices():
        assert row["milliseconds"][row["backend"]] <= CLOSE * min(row["milliseconds"].values())
        assert row["backend"].split(":")[0] in usable
    costs = costs_ms(map(AttentionChoice.model_validate, backend.choices()), is_graph=False)
    assert costs["auto"] <= 1.02 * min(costs.values())


def test_a_graph_of_auto_equals_its_eager_call() -> None:
    backend = create_backend("auto", device(), head_width=72, heads=HEADS, dtype=DTYPE)
    for lengths, slots in (((64,) * 6, 12), ((3000,), 2)):
        case = AttentionCase(HEADS, 72, DTYPE, lengths, slots=slots, padding_rows=80)
        tensors, offsets = case.tensors(device()), case.offsets(device())
        eager, replayed = run_both(lambda: backend.varlen(*tensors, offsets, max(lengths), 72**-0.5), backend)  # noqa: B023
        assert relative_error(replayed, eager, offsets) < TOLERANCE


def test_tiles_of_equal_length_match_torch(backend: AttentionBackend) -> None:
    query, key, value = (torch.randn(3, HEADS, 196, 64, device=device(), dtype=DTYPE) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    actual = backend.dense(query, key, value, None, 64**-0.5)
    assert torch.linalg.vector_norm((actual - expected).float()) < TOLERANCE * torch.linalg.vector_norm(
        expected.float()
    )


def run_both(call: Callable[[], torch.Tensor], backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
    """The call's eager output and that of a graph."""
    eager = call().clone()
    kept: list[torch.Tensor] = []
    graph = capture_calls(backend, lambda: kept.append(call()), 1)
    graph.replay()
    return eager, kept[-1].clone()


def test_a_graph_gives_the_bits_of_eager_on_the_same_input(backend: AttentionBackend) -> None:
    case = AttentionCase(HEADS, 72, DTYPE, (400, 64))
    tensors, offsets = case.tensors(device()), case.offsets(device())
    eager, replayed = run_both(lambda: backend.varlen(*tensors, offsets, 400, 72**-0.5), backend)
    assert torch.equal(eager, replayed)


def test_windows_in_a_graph_are_right_and_leave_finite_padding(backend: AttentionBackend) -> None:
    """Short segments may take a path of their own, and a later layer's tiles reach into the rows that it leaves."""
    case = AttentionCase(HEADS, 80, DTYPE, (64, 64, 16, 0, 8), slots=70, padding_rows=200)
    tensors, offsets = poisoned(case, 1e4 if backend.needs_finite_padding else float("nan")), case.offsets(device())
    kept: list[torch.Tensor] = []
    graph = capture_calls(backend, lambda: kept.append(backend.varlen(*tensors, offsets, 64, 80**-0.5)), 1)
    # What the kernel does not write is what the memory held.
    if not backend.needs_finite_padding:
        kept[-1].fill_(float("nan"))
    graph.replay()
    expected = reference_attention(*tensors, offsets, 80**-0.5, torch.float64)
    assert relative_error(kept[-1], expected, offsets) < TOLERANCE
    if backend.needs_finite_padding:
        assert bool(torch.isfinite(kept[-1]).all())
