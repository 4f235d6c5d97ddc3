"""A made-up backend comparison with known latencies, for tests of what is derived from it and how it is shown."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from vitgraph.records.candidates import UNAVAILABLE, UNSUPPORTED, before_its_turn, derive_results, series_name
from vitgraph.records.record import CompareRecord
from vitgraph.records.results import (
    COMPARED_MODES,
    OK,
    BusyTime,
    Candidate,
    CandidateComparison,
    CandidateMode,
    CompareResult,
    Recommendation,
    Reference,
)
from vitgraph.records.sample_table import REPEAT_SUFFIX, Sample, Samples
from vitgraph.records.sections import Environment, Resolved, Workload
from vitgraph.records.series import GraphFacts
from vitgraph.records.store import SAMPLES_FILE
from vitgraph.specs.parts import SAME_MARGIN_PCT

REFUSAL = "attention backend TORCH_SDPA reads segment lengths on the host, so this tower cannot be captured with it"
MEANS = {
    "FLASH_ATTN": (5.13, 4.52),
    "FLASHINFER": (5.42, 4.36),
    "TRITON_ATTN": (5.6, 4.37),
    "ROCM_AITER_FA": (None, None),
    "TORCH_SDPA": (9.1, None),
}
"""Mean milliseconds, eager and graph; None where the mode was not measured."""


def make_samples(
    means: dict[str, tuple[float | None, float | None]] = MEANS, requests: int = 400, noise: float = 0.004
) -> list[Sample]:
    """One round; every request has a size of its own that all series share, and each call a little noise."""
    rng = np.random.default_rng(7)
    sizes = rng.gamma(4.0, 0.25, requests)
    sizes /= sizes.mean()
    samples = []
    for request, size in enumerate(sizes):
        for backend, pair in means.items():
            for mode, mean in zip(COMPARED_MODES, pair, strict=True):
                for again in ("", REPEAT_SUFFIX) if mean is not None else ():
                    wall_ms = float((mean or 0.0) * size * (1 + noise * rng.standard_normal()))
                    name = series_name(backend, mode) + again
                    place = {"call": request, "requests": (request,), "series": name, "round": 0, "position": 0}
                    counts = {"items": 1, "tokens": 100, "input_rows": 400, "hits": 1, "replays": 1}
                    samples.append(Sample(**place, wall_ms=wall_ms, gpu_ms=0.9 * wall_ms, **counts))
    return samples


GRAPHS = GraphFacts(
    policy="greedy",
    mode="cuda",
    graphs=24,
    capture_s=2.5,
    pool_bytes=700 * 2**20,
    buffer_bytes=91 * 2**20,
    replay_ms=4.1,
    gpu_busy_ms=3.9,
    launch_gap=4.1 / 3.9,
    hits=380,
    misses=20,
    items=400,
    hit_rate=0.95,
    misses_by_reason={"not_exact": 20},
    replays=380,
    waste=0.123,
)


def make_row(name: str, eager_ms: float | None, graph_ms: float | None) -> Candidate:
    """A row before anything is derived from samples; a backend without any mode is unavailable."""
    if eager_ms is None:
        missing = CandidateMode(status=UNAVAILABLE, reason="it needs an AMD GPU")
        return before_its_turn(name).with_modes(eager=missing, graph=missing)
    busy = BusyTime(calls=3, gpu_busy_ms=4.0, wall_ms=5.0, share=0.8) if graph_ms is not None else None
    eager = CandidateMode(status=OK, error_vs_float32=0.0112, busy=busy)
    graph = CandidateMode(status=UNSUPPORTED, reason=REFUSAL)
    if graph_ms is not None:
        graph = CandidateMode(status=OK, error_vs_float32=0.0113, busy=busy)
    row = before_its_turn(name).with_modes(eager=eager, graph=graph)
    graphs = None if graph_ms is None else GRAPHS
    return row.but(used=name, implementation=f"{name.lower()} 1.2", graphs=graphs)


@cache
def made_up_result() -> CompareResult:
    """The result of the made-up run as it is."""
    return make_result()


def make_result(
    means: dict[str, tuple[float | None, float | None]] = MEANS,
    samples: list[Sample] | None = None,
    *,
    invalid_reasons: tuple[str, ...] = (),
    margin_pct: float = SAME_MARGIN_PCT,
    **comparison: Any,
) -> CompareResult:
    """The result of the made-up run."""
    reference = Reference(backend="TORCH_SDPA", dtype="float32", calls=4, items=4, own_error=0.011, limit=0.03)
    facts = {"mode": "cuda", "reference": reference, "invalid_reasons": invalid_reasons}
    result = CompareResult(
        candidates=tuple(make_row(name, *pair) for name, pair in means.items()),
        comparison=CandidateComparison(**facts | comparison),
        recommendation=Recommendation(text=""),
    )
    found = Samples.of(make_samples(means) if samples is None else samples)
    return derive_results(result, found, seed=0, margin_pct=margin_pct)


def make_record(*arguments: Any, **more: Any) -> CompareRecord:
    """A complete record of the made-up run."""
    counts = {"requests": 400, "calls": 400, "items": 400, "images": 400, "videos": 0}
    return CompareRecord(
        status="complete",
        status_reason=None,
        vitgraph_version="0.1.0",
        created_at="2026-01-01T00:00:00+00:00",
        command=("vitgraph", "compare-backends"),
        settings={"model": {"model": "qwen3-vl-30b-a3b"}},
        resolved=Resolved(model="qwen3-vl-30b-a3b"),
        environment=Environment(device="NVIDIA H200", device_type="cuda"),
        workload=Workload(name="mixed-chat", fingerprint="f", **counts),
        result=make_result(*arguments, **more) if arguments or more else made_up_result(),
        samples_file=SAMPLES_FILE,
    )
