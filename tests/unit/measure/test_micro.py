"""Attention alone: which rows there are, and that a backend that cannot run keeps its reason."""

from __future__ import annotations

import pytest
import torch

from vitgraph.attention import base
from vitgraph.attention.measure import AttentionCase
from vitgraph.errors import BackendError
from vitgraph.measure.micro import sweep_cases, time_backend

CPU = torch.device("cpu")
CASES = sweep_cases(AttentionCase(2, 8, torch.float32, ()), (4, 16), (1, 3), slot_counts=(8, 1024), slot_length=4)


def test_every_length_count_and_slot_count_has_a_row() -> None:
    rows = time_backend("TORCH_SDPA", CASES, CPU)
    columns = ("sweep", "segment_length", "segments", "slots", "rows")
    assert [tuple(getattr(row, name) for name in columns) for row in rows] == [
        ("length", 4, 1, 1, 4),
        ("length", 4, 3, 3, 12),
        ("length", 16, 1, 1, 16),
        ("length", 16, 3, 3, 48),
        ("slots", 4, 1, 8, 4),
        ("slots", 4, 1, 1024, 4),
    ]
    assert all(row.status == "ok" and row.milliseconds > 0 and row.relative_error < 1e-5 for row in rows)
    assert all(row.timed_as == "eager" and row.limit_ms is None for row in rows)


def test_the_limit_is_the_work_of_the_segments_over_the_matrix_rate() -> None:
    row = time_backend("TORCH_SDPA", CASES, CPU, 1e6)[1]
    assert row.limit_ms == pytest.approx(4 * 2 * 8 * 3 * 4**2 / 1e6 * 1e3)
    assert row.limit_share == pytest.approx(row.limit_ms / row.milliseconds)


def test_a_backend_that_cannot_run_keeps_one_row_with_its_reason() -> None:
    (row,) = time_backend("FLASH_ATTN", CASES, CPU)
    assert (row.backend, row.status, row.milliseconds) == ("FLASH_ATTN", "unsupported", None)
    assert "needs a CUDA device" in row.reason


def test_a_wrong_or_failing_case_is_not_timed_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    real = base.TorchSdpaBackend.varlen

    def varlen(self: base.TorchSdpaBackend, query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        if query.shape[0] == 12:
            raise RuntimeError("illegal instruction\nsecond line")
        out = real(self, query, *others)  # type: ignore[arg-type]
        return out * float("nan") if query.shape[0] == 48 else out

    monkeypatch.setattr(base.TorchSdpaBackend, "varlen", varlen)
    rows = time_backend("TORCH_SDPA", CASES, CPU)
    assert [row.status for row in rows] == ["ok", "error", "ok", "incorrect", "ok", "ok"]
    assert rows[1].reason == "RuntimeError: illegal instruction"
    assert "relative error nan" in rows[3].reason
    assert rows[3].milliseconds is None


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(BackendError, match="unknown attention backend 'XFORMERS'"):
        time_backend("XFORMERS", CASES, CPU)
