"""Sums that compiled blocks leave to the next: which graphs are changed, and that the hidden state stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vitgraph.measure.setup import load, resolve_source
from vitgraph.models.fusions import CompiledBlockRunner, ResidualStream, open_last_sum, run_block
from vitgraph.models.registry import ROWS
from vitgraph.specs.parts import ModelSpec

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Block(nn.Module):
    """A residual block of width 16; `end` makes its output of the stream and the branch."""

    def __init__(self, end: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.branch, self.end = nn.LayerNorm(16), nn.Linear(16, 16), end

    def forward(self, hidden: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        hidden = hidden * scale
        return self.end(hidden, self.branch(self.norm(hidden)))


class ScaledBlock(Block):
    """A block whose branch has a factor of its own, as InternVL's; `end` takes the scaled branch."""

    def __init__(self, end: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(end)
        self.factor = nn.Parameter(torch.randn(16))

    def forward(self, hidden: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        hidden = hidden * scale
        return self.end(hidden, self.factor * self.branch(self.norm(hidden)))


class Tracer:
    """A backend of `torch.compile` that opens sums and runs the graph as it is."""

    def __init__(self) -> None:
        self.opened: list[bool] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.opened.append(open_last_sum(graph))
        graph.graph.lint()
        return graph.forward


def summed(hidden: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    return hidden + branch


def branch_first(hidden: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    return 0.5 * branch + hidden


@pytest.mark.parametrize("end", [summed, branch_first], ids=["stream first", "scaled branch first"])
@torch.inference_mode()
def test_the_hidden_state_is_that_of_the_blocks(end: Callable[..., torch.Tensor]) -> None:
    """Over three blocks of one compilation, with a reader of the whole sum after each."""
    tracer, blocks = Tracer(), [Block(end) for _ in range(3)]
    run_compiled = CompiledBlockRunner(tracer)
    plain = opened = ResidualStream(torch.randn(7, 16))
    for block in blocks:
        plain, opened = run_block(block, plain, scale=0.9), run_compiled(block, opened, scale=0.9)
        assert plain.addend is None
        assert opened.addend is not None
        assert torch.allclose(plain.whole(), opened.whole(), atol=1e-6)
        assert not torch.allclose(opened.hidden, opened.whole())
    assert tracer.opened == [True]


@pytest.mark.parametrize(("end", "is_opened"), [(summed, True), (lambda hidden, branch: hidden - branch, False)])
@torch.inference_mode()
def test_the_next_block_scales_the_branch(end: Callable[..., torch.Tensor], is_opened: bool) -> None:
    """Each with the factor of the block that the branch is of; one compilation, though the first has none before it."""
    tracer, blocks = Tracer(), [ScaledBlock(end) for _ in range(3)]
    run_compiled = CompiledBlockRunner(tracer, blocks, "factor")
    plain = opened = ResidualStream(torch.randn(7, 16))
    for block in blocks:
        plain, opened = run_block(block, plain, scale=0.9), run_compiled(block, opened, scale=0.9)
        assert torch.allclose(plain.whole(), opened.whole(), atol=1e-6)
        assert torch.equal(opened.hidden, opened.whole()) is not is_opened
    assert tracer.opened == [is_opened]


def clamped(hidden: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    return (hidden + branch).clamp(-1, 1)


def read_twice(hidden: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    total = hidden + branch
    return total + total.mean(-1, keepdim=True)


def widened(hidden: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    return hidden + branch[:, :1]


def scaled_sum(hidden: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    return torch.add(hidden, branch, alpha=0.5)


@pytest.mark.parametrize("end", [clamped, read_twice, widened, scaled_sum])
@torch.inference_mode()
def test_every_other_end_stays_closed_and_right(end: Callable[..., torch.Tensor]) -> None:
    tracer, block = Tracer(), Block(end)
    plain = ResidualStream(torch.randn(7, 16))
    opened = CompiledBlockRunner(tracer)(block, plain)
    assert tracer.opened == [False]
    assert torch.allclose(opened.whole(), run_block(block, plain).whole(), atol=1e-6)


@torch.inference_mode()
def test_a_stream_that_begins_as_a_sum() -> None:
    hidden, positions, block = torch.randn(5, 16), torch.randn(5, 16), Block(summed)
    opened = CompiledBlockRunner(Tracer())(block, ResidualStream(hidden, positions))
    assert torch.allclose(opened.whole(), block(hidden + positions), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "internvl"])
@torch.inference_mode()
def test_towers_leave_their_sums_open_in_one_compilation(name: str, traced_only: None) -> None:
    """Deepstack taps, window attention and layer scales included; Inductor's own part is tested elsewhere."""
    (row,) = (row for row in ROWS if row.name == name)
    outputs = []
    for is_compiled in (False, True):
        spec = ModelSpec(row.debug_preset, load_format="dummy", device="cpu", compile=is_compiled)
        encoder, facts = load(resolve_source(spec), spec, device=torch.device("cpu"), dtype=torch.float32)
        items = [encoder.rule.image_geometry(140, 84), encoder.rule.image_geometry(84, 112)]
        rows = sum(encoder.rule.pixel_rows(item)["pixel_values"] for item in items)
        inputs = encoder.make_inputs(items, encoder.random_pixels({"pixel_values": rows}, 0))
        outputs.append(encoder.encoder_eager_forward(inputs))
    assert facts.compiled is not None and facts.compiled.fusions["open_sums"]
    # One kind of block, and where there are some, the position embeddings.
    assert facts.compiled.compilations == 1 + len(encoder.compiled_functions)
    assert float((outputs[1] - outputs[0]).norm() / outputs[0].norm()) <= 1e-5
