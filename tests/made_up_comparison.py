"""A made-up backend comparison with known latencies, for tests of what is derived from it and how it is shown."""

from __future__ import annotations

from typing import Any

import numpy as np
from record_dicts import CompareRecord

from vitgraph.records import record as records
from vitgraph.records.candidates import (
    COMPARED_MODES,
    OK,
    UNAVAILABLE,
    UNSUPPORTED,
    derive_results,
    empty_row,
    series_name,
    set_status,
)
from vitgraph.records.sample_table import REPEAT_SUFFIX, Sample, Samples
from vitgraph.records.store import SAMPLES_FILE

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


def make_rows(means: dict[str, tuple[float | None, float | None]] = MEANS) -> list[dict[str, Any]]:
    """Rows before anything is derived from samples; a backend without any mode is unavailable."""
    rows = []
    for backend, pair in means.items():
        row = empty_row(backend)
        modes = {mode: {"status": OK, "reason": None} for mode in COMPARED_MODES}
        if pair == (None, None):
            modes = {mode: {"status": UNAVAILABLE, "reason": "it needs an AMD GPU"} for mode in COMPARED_MODES}
        else:
            row |= {"used": backend, "implementation": f"{backend.lower()} 1.2"}
            row["eager"]["error_vs_float32"] = 0.0112
            row["graph"]["error_vs_float32"] = None if pair[1] is None else 0.0113
        if pair[0] is not None and pair[1] is None:
            modes["graph"] = {"status": UNSUPPORTED, "reason": REFUSAL}
        if pair[1] is not None:
            row["graphs"] = {
                "policy": "greedy",
                "mode": "cuda",
                "graphs": 24,
                "capture_s": 2.5,
                "pool_bytes": 700 * 2**20,
                "buffer_bytes": 91 * 2**20,
                "replay_ms": 4.1,
                "gpu_busy_ms": 3.9,
                "launch_gap": 4.1 / 3.9,
                "hits": 380,
                "misses": 20,
                "items": 400,
                "hit_rate": 0.95,
                "misses_by_reason": {"not_exact": 20},
                "replays": 380,
                "waste": 0.123,
            }
            for mode in modes:
                row[mode]["busy"] = {"calls": 3, "gpu_busy_ms": 4.0, "wall_ms": 5.0, "share": 0.8}
        set_status(row, modes)
        rows.append(row)
    return rows


def make_record(
    means: dict[str, tuple[float | None, float | None]] = MEANS,
    samples: list[Sample] | None = None,
    *,
    invalid_reasons: tuple[str, ...] = (),
    mode: str = "cuda",
) -> CompareRecord:
    """A complete record of the made-up run."""
    rows = make_rows(means)
    comparison: dict[str, Any] = {
        "mode": mode,
        "isolated": False,
        "reference": {
            "backend": "TORCH_SDPA",
            "dtype": "float32",
            "calls": 4,
            "items": 4,
            "own_error": 0.011,
            "limit": 0.03,
        },
        "invalid_reasons": list(invalid_reasons),
    }
    found = make_samples(means) if samples is None else samples
    recommendation = derive_results(rows, comparison, Samples.of(found), seed=0)
    facts = {"requests": 400, "calls": 400, "items": 400, "images": 400, "videos": 0}
    record = records.CompareRecord.model_validate(
        {
            "status": "complete",
            "status_reason": None,
            "vitgraph_version": "0.1.0",
            "created_at": "2026-01-01T00:00:00+00:00",
            "command": ["vitgraph", "compare-backends"],
            "settings": {"model": {"model": "qwen3-vl-30b-a3b"}},
            "resolved": {"model": "qwen3-vl-30b-a3b"},
            "environment": {"device": "NVIDIA H200", "device_type": "cuda"},
            "workload": {"name": "mixed-chat", "fingerprint": "f", **facts},
            "result": {"candidates": rows, "comparison": comparison, "recommendation": recommendation},
            "samples_file": SAMPLES_FILE,
        }
    )
    return CompareRecord.of(record)
