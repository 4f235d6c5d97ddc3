"""What passes beyond the tolerance: as much as a tower's own eager run is from float32, measured on the item."""

from __future__ import annotations

import pytest
import torch

from vitgraph.attention.registry import create_backend
from vitgraph.models.geometry import GridGeometry
from vitgraph.models.loading import load_encoder
from vitgraph.models.registry import resolve_model
from vitgraph.planning.budgets import EncoderItemSpec
from vitgraph.verify.probes import Candidate, Probe, ProbeStore, item_catalogue
from vitgraph.verify.session import EVERY_GRAPH, FINITE, ORDER, CheckBook, unreached


def rounded_book(own_error: float, output: float) -> CheckBook:
    """A book that compared one output, so far from eager, of a tower whose eager run is so far from float32."""
    candidate = Candidate(GridGeometry("image", 1, 2, 2), EncoderItemSpec("image", 4, 1, 1), 1.0, "28x28")
    book = CheckBook(2e-2, lambda probe: own_error, under_way=EVERY_GRAPH)
    book.checks = {name: unreached(name) for name in (EVERY_GRAPH, FINITE, ORDER)}
    probe = Probe(candidate, 0, {}, torch.ones(1, 100))
    book.compare([probe], [torch.full((1, 100), 1 + output)], "a graph")
    return book


@pytest.mark.parametrize(
    ("own_error", "output", "passes", "asked"),
    [
        (0.018, 0.0200, True, None),
        (0.018, 0.0255, True, 0.018),
        (0.018, 0.0285, False, 0.018),
        (0.001, 0.0255, False, 0.001),
        (0.0, 0.0255, False, 0.0),
    ],
)
def test_beyond_the_tolerance_an_output_may_have_what_its_own_eager_run_rounds(
    own_error: float, output: float, passes: bool, asked: float | None
) -> None:
    book = rounded_book(own_error, output)
    assert (book.total_failures == 0, book.own_error) == (passes, asked)
    assert book.max_rel_l2 == pytest.approx(output, rel=1e-4)


def test_a_towers_own_rounding_is_measured_with_its_own_weights() -> None:
    attention = create_backend("TORCH_SDPA", torch.device("cpu"))
    source = resolve_model("glm-ocr-debug")
    encoder = load_encoder(source, attention, device=torch.device("cpu"), dtype=torch.bfloat16, load_format="dummy")
    store = ProbeStore(encoder, 0)
    probe = store.get(item_catalogue(encoder.rule)[0])
    assert 1e-3 < store.rounding(probe) < 3e-2
    assert next(encoder.modules.parameters()).dtype == torch.bfloat16
    probe.reference, probe.own_error = probe.reference * float("nan"), None
    assert store.rounding(probe) == 0.0
