"""Names, availability, declarations, and how `auto` chooses."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from transformers import AttentionInterface

from vitgraph.attention import selection
from vitgraph.attention.measure import AttentionCase
from vitgraph.attention.registry import BACKENDS, backend_class, create_backend, describe_backends, unavailable_backends
from vitgraph.attention.selection import Candidate, choose, pick_backend, time_backend
from vitgraph.attention.torch_sdpa import TorchSdpaBackend
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
    monkeypatch.setattr(selection, "_try_candidate", lambda *_: pytest.fail("nothing is to be measured on a CPU"))
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


# -- choosing ---------------------------------------------------------------------------------------------------------


def test_the_fastest_over_all_lengths_is_chosen_not_the_one_fastest_at_the_longest() -> None:
    candidates = [
        Candidate("FLASH_ATTN", 4, "ok", milliseconds=(0.02, 0.03, 0.10)),
        Candidate("TRITON_ATTN", None, "ok", milliseconds=(0.04, 0.06, 0.09)),
    ]
    chosen = choose(candidates, (64, 400, 3072))
    assert (chosen.name, chosen.version) == ("FLASH_ATTN", 4)
    assert [record["status"] for record in chosen.as_records()] == ["ok", "ok"]


def test_failures_keep_their_reason_and_are_not_chosen() -> None:
    candidates = [
        Candidate("FLASH_ATTN", 4, "incorrect", "relative error 0.3 against float32"),
        Candidate("FLASHINFER", None, "unsupported", "not installed"),
        Candidate("TRITON_ATTN", None, "ok", milliseconds=(5.0,)),
    ]
    chosen = choose(candidates, (64,))
    assert chosen.name == "TRITON_ATTN"
    assert [record["reason"] for record in chosen.as_records()][:2] == [
        "relative error 0.3 against float32",
        "not installed",
    ]


def test_nothing_usable_names_every_reason() -> None:
    with pytest.raises(BackendError, match="FLASH_ATTN: too old; TRITON_ATTN: no compiler"):
        choose(
            [Candidate("FLASH_ATTN", 2, "error", "too old"), Candidate("TRITON_ATTN", None, "error", "no compiler")],
            (64,),
        )


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


def test_a_wrong_output_is_found_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "graph_ms", lambda *_: pytest.fail("a wrong backend must not be timed"))
    outcome = time_backend(Doubling(), CASES, CPU)
    assert outcome["status"] == "incorrect"
    assert math.isclose(outcome["relative_error"], 1.0, rel_tol=1e-4)
    assert "relative error 1" in outcome["reason"]


def test_a_crash_is_one_line_of_reason() -> None:
    outcome = time_backend(Crashing(), CASES, CPU)
    assert (outcome["status"], outcome["reason"]) == ("error", "ValueError: no kernel image")


def test_heads_that_a_backend_does_not_take_are_unsupported() -> None:
    assert time_backend(NarrowOnly(), CASES, CPU)["status"] == "unsupported"


def test_a_failed_capture_is_called_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> float:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(selection, "graph_ms", refuse)
    outcome = time_backend(Right(), CASES, CPU)
    assert outcome["status"] == "capture_failed"
    assert "stream is capturing" in outcome["reason"]


def test_auto_measures_once_for_equal_heads_and_tries_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def try_candidate(backend: type[TorchSdpaBackend], version: int | None, *_: Any) -> Candidate:
        tried.append(backend.name)
        times = {"RIGHT": (1.0,), "NARROW": (0.5,)}.get(backend.name)
        return Candidate(backend.name, version, "ok" if times else "error", "broken", milliseconds=times or ())

    monkeypatch.setattr(selection, "_SELECTIONS", {})
    monkeypatch.setattr(selection, "_try_candidate", try_candidate)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    backends = {backend.name: backend for backend in (Crashing, Right, NarrowOnly)}
    first = pick_backend(GPU, 72, 16, torch.bfloat16, backends=backends)
    assert pick_backend(GPU, 72, 16, torch.bfloat16, backends=backends) is first
    assert first.name == "NARROW"
    assert tried == ["CRASHING", "RIGHT", "NARROW"]
    pick_backend(GPU, 80, 16, torch.bfloat16, backends=backends)
    assert len(tried) == 6


def test_a_backend_that_cannot_be_captured_is_no_candidate() -> None:
    outcome = selection._try_candidate(TorchSdpaBackend, None, CASES, CPU)
    assert (outcome.status, outcome.reason) == ("unsupported", "its call cannot be captured")
