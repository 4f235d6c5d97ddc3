"""`vitgraph doctor`: what is found out, what it advises, and that no missing part ends it."""

from __future__ import annotations

import io
import json
import threading
import urllib.error
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from vitgraph import hub
from vitgraph.attention import registry
from vitgraph.attention.registry import BACKENDS
from vitgraph.cli import app
from vitgraph.commands import machine as doctor
from vitgraph.measure import environment
from vitgraph.records.sections import GpuState
from vitgraph.report.to_terminal import render as render_document
from vitgraph.report.views.machine import doctor_document


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_ENDPOINT", raising=False)


@pytest.fixture
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, state: GpuState | None, **refusals: str | None) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 << 30, 140 << 30))
    monkeypatch.setattr(environment, "read_gpu_state", lambda device: state)
    rows = [
        {
            "name": name,
            "unavailable_reason": refusals.get(name),
            "is_capture_safe": name != "TORCH_SDPA",
            "head_widths": "any",
        }
        for name in BACKENDS
    ]
    monkeypatch.setattr(registry, "describe_backends", lambda device: rows)
    monkeypatch.setattr(
        "vitgraph.attention.flash_attn.GENERATIONS",
        {
            2: SimpleNamespace(unavailable_reason=lambda device: None),
            4: SimpleNamespace(unavailable_reason=lambda device: "not there; pip install 'vitgraph[flash-attn-4]'"),
        },
    )


COOL = GpuState(
    values={
        "driver_version": "570.1",
        "clocks.sm": "1980",
        "clocks.max.sm": "1980",
        "power.draw": "[N/A]",
        "power.limit": "700.00",
        "temperature.gpu": "34",
    },
    other_processes=0,
)
HOT = GpuState(values={**COOL.values, "clocks_event_reasons.hw_thermal_slowdown": "Active"}, other_processes=2)


def test_a_cpu_machine_is_described_whole(cpu_only: None) -> None:
    facts = doctor.examine()
    assert facts["torch"] == torch.__version__
    assert facts["gpus"] == []
    assert [row["name"] for row in facts["backends"]] == list(BACKENDS)
    assert {row["name"]: row["fits"] for row in facts["libraries"] if row["name"] in ("torch", "transformers")} == {
        "torch": True,
        "transformers": True,
    }
    assert facts["can_run"] == [
        "plans of any model, and checks of correctness on the CPU (a CPU has no CUDA Graphs: no speed-up there)"
    ]
    assert facts["hub"] == {
        "endpoint": "https://huggingface.co",
        "reachable": False,
        "reason": "HF_HUB_OFFLINE is set",
    }
    json.dumps(facts, allow_nan=False)


def test_a_gpu_machine_names_its_backends_clocks_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, COOL, FLASHINFER="no cudnn; pip install 'vitgraph[flashinfer]'", ROCM_AITER_FA="no AMD")
    facts = doctor.examine()
    assert facts["driver"] == "570.1"
    assert [gpu["index"] for gpu in facts["gpus"]] == [0, 1]
    gpu = facts["gpus"][0]
    assert (gpu["free_bytes"], gpu["sm_clock_mhz"], gpu["power_draw_w"]) == (100 << 30, 1980.0, None)
    assert (gpu["throttled_by"], gpu["other_processes"], gpu["compute_capability"]) == ([], 0, "9.0")
    assert facts["can_run"] == ["graph and eager mode on NVIDIA H200 with FLASH_ATTN, TRITON_ATTN"]
    assert "pip install 'vitgraph[flashinfer]'" in facts["advice"]
    assert "pip install 'vitgraph[flash-attn-4]'" in facts["advice"]
    assert not any("AMD" in line for line in facts["advice"])


def test_throttling_and_other_processes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, HOT)
    facts = doctor.examine()
    assert facts["gpus"][0]["throttled_by"] == ["hw_thermal_slowdown"]
    assert any(line.startswith("GPU 1 is throttled (hw_thermal_slowdown)") for line in facts["advice"])
    assert any(line.startswith("GPU 0 has 2 other process(es)") for line in facts["advice"])


def test_a_gpu_without_the_drivers_tool_keeps_its_unknowns(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, None)
    facts = doctor.examine()
    assert "clocks unknown without nvidia-smi" in render(facts, 200)
    gpu = facts["gpus"][0]
    assert (gpu["driver"], gpu["sm_clock_mhz"], gpu["throttled_by"]) == (None, None, None)


def test_a_driver_with_a_torch_for_cpus_is_told_which_torch_it_needs(
    cpu_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.version, "cuda", None)
    facts = doctor.examine()
    assert facts["torch_problem"] == "this torch is built for CPUs only"
    assert any("install a CUDA build of torch" in line for line in facts["advice"])


def test_what_torch_warns_about_the_driver_is_the_reason(cpu_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    def is_available() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old\nmore", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    problem = doctor.examine()["torch_problem"]
    assert problem == "this torch, built for CUDA 13.0, sees no GPU: The NVIDIA driver on your system is too old"


def test_a_broken_package_does_not_end_the_examination(cpu_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(device: torch.device) -> None:
        raise RuntimeError("undefined symbol")

    monkeypatch.setattr(registry, "describe_backends", explode)
    facts = doctor.examine()
    assert facts["backends_problem"] == "RuntimeError: undefined symbol"
    assert facts["can_run"] == []


def test_without_torch_nothing_runs_and_the_advice_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real_import, real_version = builtins.__import__, metadata.version

    def refuse(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return real_import(name, *rest)

    def version(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return real_version(name)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(metadata, "version", version)
    facts = doctor.examine()
    assert facts["torch_problem"] == "torch does not import (No module named 'torch')"
    assert facts["can_run"] == []
    assert any(line.startswith("pip install 'torch") for line in facts["advice"])
    assert "Can run: nothing" in render(facts, 80)


def test_a_library_out_of_range_is_named_with_its_range(monkeypatch: pytest.MonkeyPatch, cpu_only: None) -> None:
    monkeypatch.setattr(
        metadata, "requires", lambda name: ["transformers<6,>=5.24", "torch>=2.11", 'x; extra == "dev"']
    )
    versions = {"transformers": "4.57.0", "torch": "2.13.0+cpu"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    rows = {row["name"]: row for row in doctor.check_requirements()}
    assert rows["transformers"] == {
        "name": "transformers",
        "wanted": "<6,>=5.24",
        "installed": "4.57.0",
        "fits": False,
    }
    assert rows["torch"]["fits"] is True
    assert rows["flash-attn-4"] == {"name": "flash-attn-4", "wanted": None, "installed": None, "fits": None}
    assert "x" not in rows


# -- hub ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")


def http_error(code: int) -> Any:
    def open_url(request: Any, timeout: float) -> Any:
        raise urllib.error.HTTPError(request.full_url, code, "no", {}, io.BytesIO())  # type: ignore[arg-type]

    return open_url


def unreachable(request: Any, timeout: float) -> Any:
    raise urllib.error.URLError("Name or service not known")


@pytest.mark.parametrize(
    ("open_url", "reason"),
    [
        (lambda request, timeout: nullcontext(), None),
        (http_error(404), None),
        (http_error(403), "answered 403"),
        (http_error(503), "answered 503"),
        (unreachable, "Name or service not known"),
    ],
)
def test_the_hub_answers_or_the_reason_is_kept(online: None, open_url: Any, reason: str | None) -> None:
    expected = {"endpoint": "https://hub.example", "reachable": reason is None, "reason": reason}
    assert hub.check_hub(open_url) == expected


def test_a_hub_that_hangs_costs_no_more_than_the_bound(online: None) -> None:
    answered = threading.Event()

    def hang(request: Any, timeout: float) -> Any:
        answered.wait()
        return nullcontext()

    found = hub.check_hub(hang, timeout_s=0.2)
    answered.set()
    assert found["reason"] == "no answer within 0.2 s"


def test_the_bound_is_three_seconds() -> None:
    assert hub.HUB_TIMEOUT_S == 3.0


# -- memory ------------------------------------------------------------------------------------------------------------


def test_host_memory_is_read_where_the_system_tells_it(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n")
    assert doctor.read_memory(path) == {"total_bytes": 2 << 20, "available_bytes": 1 << 20}
    assert doctor.read_memory(tmp_path / "none") == {"total_bytes": None, "available_bytes": None}


# -- output ------------------------------------------------------------------------------------------------------------


def render(facts: dict[str, Any], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    render_document(doctor_document(facts), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_shows_each_part_without_cutting_a_cell(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, HOT, FLASHINFER="no cudnn [here]; pip install 'vitgraph[flashinfer]'")
    text = render(doctor.examine(), width)
    flat = " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for part in ("570.1", "generation 4", "Can run: graph and eager mode on NVIDIA H200", "HF_HUB_OFFLINE is set"):
        assert part in flat
    assert (
        "GPU 1 NVIDIA H200, compute capability 9.0; 100.00 GiB of 140.00 GiB free; SM clock 1980 of 1980 MHz; – of 700 "
        "W; 34 °C; throttled by hw_thermal_slowdown; other processes on it: 2"
    ) in flat
    if width == 200:
        assert "no cudnn [here]; pip install 'vitgraph[flashinfer]'" in flat


def test_the_command_prints_json_and_exits_with_0_offline(cpu_only: None) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["hub"]["reachable"] is False


def test_the_command_exits_with_1_where_nothing_can_run(cpu_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "describe_backends", lambda device: [])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "Can run: nothing" in result.stdout
