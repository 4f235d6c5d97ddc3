"""Names, availability, declarations, and how `auto` chooses."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from transformers import AttentionInterface

from vitgraph.attention import measure
from vitgraph.attention.base import TorchSdpaBackend
from vitgraph.attention.measure import AttentionCase, check_backend, try_candidates
from vitgraph.attention.registry import BACKENDS, backend_class, create_backend, describe_backends, unavailable_backends
from vitgraph.errors import BackendError

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def test_backends_are_named_as_upstream_names_them() -> None:
    assert list(BACKENDS) == ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "ROCM_AITER_FA", "TORCH_SDPA"]
    assert [backend_class(name).name for name in BACKENDS] == list(BACKENDS)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BackendError, match=r"'XFORMERS'; known: FLASH_ATTN, FLASHINFER, .*, or auto"):
        create_backend("XFORMERS", CPU)


def test_on_a_cpu_only_torchs_own_attention_runs_and_every_other_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    missing = unavailable_backends(CPU)
    assert set(missing) == set(BACKENDS) - {"TORCH_SDPA"}
    assert "needs a CUDA device, this is cpu" in missing["FLASH_ATTN"]
    assert "needs a CUDA device, this is cpu" in missing["FLASHINFER"]
    assert "triton" in missing["TRITON_ATTN"].lower()
    assert "untested" in missing["ROCM_AITER_FA"]


def test_a_backend_that_cannot_run_here_is_refused_with_the_ones_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match=r"FLASHINFER cannot run on cpu: .* Available: TORCH_SDPA$"):
        create_backend("FLASHINFER", CPU)


@pytest.mark.parametrize("facts", [{}, {"head_width": 72, "heads": 16, "dtype": torch.float32}])
def test_auto_on_a_cpu_is_torch_without_measuring(facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_try_candidate", lambda *_: pytest.fail("nothing is to be measured on a CPU"))
    backend = create_backend("auto", CPU, **facts)
    assert backend.name == "TORCH_SDPA"
    assert backend.selection == ()
    assert backend.transformers_name in AttentionInterface._global_mapping


def test_a_forced_generation_needs_flash_attn() -> None:
    with pytest.raises(BackendError, match="--flash-attn-version 2 was given, but the backend is TORCH_SDPA"):
        create_backend("TORCH_SDPA", CPU, flash_attn_version=2)


def test_auto_with_a_forced_generation_means_flash_attn() -> None:
    with pytest.raises(BackendError, match="FLASH_ATTN cannot run on cpu"):
        create_backend("auto", CPU, flash_attn_version=4)


def test_each_backend_declares_what_it_takes_and_how_it_pads() -> None:
    rows = {row["name"]: row for row in describe_backends(CPU)}
    assert rows["TORCH_SDPA"]["unavailable_reason"] is None
    assert rows["TORCH_SDPA"]["is_capture_safe"] is False
    assert rows["ROCM_AITER_FA"]["is_capture_safe"] is False
    assert [name for name, row in rows.items() if row["is_capture_safe"]] == ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"]
    assert [name for name, row in rows.items() if row["writes_padding_rows"]] == ["TORCH_SDPA"]
    assert "multiples of 64" in rows["FLASHINFER"]["segment_padding"]
    assert rows["FLASHINFER"]["dtypes"] == ["float16", "bfloat16"]
    assert rows["TORCH_SDPA"]["dtypes"] == "any"


# -- what auto may choose from ----------------------------------------------------------------------------------------


class Doubling(TorchSdpaBackend):
    """Wrong by a factor of two."""

    name: ClassVar[str] = "DOUBLING"
    is_capture_safe: ClassVar[bool] = True

    def varlen(self, *arguments: Any) -> torch.Tensor:
        return super().varlen(*arguments) * 2


class Crashing(TorchSdpaBackend):
    """Raises in its first call."""

    name: ClassVar[str] = "CRASHING"
    is_capture_safe: ClassVar[bool] = True

    def varlen(self, *arguments: Any) -> torch.Tensor:
        raise ValueError("no kernel image\nand a page of advice")


class NarrowOnly(TorchSdpaBackend):
    """Takes no heads wider than 64."""

    name: ClassVar[str] = "NARROW"
    is_capture_safe: ClassVar[bool] = True

    def unsupported_reason(self, head_width: int, dtype: torch.dtype) -> str | None:
        return f"head width {head_width}" if head_width > 64 else None


class Right(TorchSdpaBackend):
    """Right, and said to be capturable."""

    name: ClassVar[str] = "RIGHT"
    is_capture_safe: ClassVar[bool] = True


CASES = [AttentionCase(2, 72, torch.float32, lengths) for lengths in ((8,) * 4, (20, 12))]


def test_a_wrong_output_is_found() -> None:
    outcome = check_backend(Doubling(), CASES, CPU)
    assert outcome["status"] == "incorrect"
    assert math.isclose(outcome["relative_error"], 1.0, rel_tol=1e-4)
    assert "relative error 1" in outcome["reason"]


def test_a_crash_is_one_line_of_reason() -> None:
    outcome = check_backend(Crashing(), CASES, CPU)
    assert (outcome["status"], outcome["reason"]) == ("error", "ValueError: no kernel image")


def test_heads_that_a_backend_does_not_take_are_unsupported() -> None:
    assert check_backend(NarrowOnly(), CASES, CPU)["status"] == "unsupported"


def test_candidates_keep_their_reasons_and_only_right_ones_a_backend() -> None:
    backends = {backend.name: backend for backend in (Crashing, Right, Doubling, NarrowOnly)}
    tried = try_candidates(CPU, 72, 2, torch.float32, backends=backends)
    assert [(found.label, found.status) for found in tried] == [
        ("CRASHING", "error"),
        ("RIGHT", "ok"),
        ("DOUBLING", "incorrect"),
        ("NARROW", "unsupported"),
    ]
    assert [found.label for found in tried if found.backend is not None] == ["RIGHT"]
    assert all(found.as_record()["reason"] for found in tried if found.status != "ok")


def test_nothing_usable_names_every_reason() -> None:
    backends = {backend.name: backend for backend in (Crashing, NarrowOnly)}
    with pytest.raises(BackendError, match="CRASHING: ValueError: no kernel image; NARROW: head width 72"):
        try_candidates(CPU, 72, 2, torch.float32, backends=backends)


def test_a_backend_that_cannot_be_captured_is_no_candidate() -> None:
    outcome = measure._try_candidate(TorchSdpaBackend, None, CASES, CPU)
    assert (outcome.status, outcome.reason) == ("unsupported", "its call cannot be captured")
