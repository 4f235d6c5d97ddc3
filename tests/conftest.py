"""Shared fixtures. GPU tests carry the marker `requires_cuda` and are skipped where torch sees no GPU."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer.main
import typer.testing

from vitgraph.measure.setup import load, resolve_source
from vitgraph.models.encoder import VisionEncoder
from vitgraph.report import charts, to_html
from vitgraph.specs import ModelSpec

torch.set_num_threads(1)
# An error that nobody foresaw is one line to a user; a test shows where it comes from.
os.environ.setdefault("VITGRAPH_DEBUG", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("requires_cuda"):
            item.add_marker(skip)


_frozen_modules = 0


@pytest.fixture(autouse=True)
def _what_is_imported_is_not_collected() -> None:
    """Runs collect before they measure; millions of objects of imported libraries would be walked each time."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules:
        _frozen_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _the_command_line_is_built_once() -> None:
    """Typer's runner turns some 300 options into parameters again at each call."""
    typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]


@pytest.fixture
def drawn() -> None:
    """The charts of a test of commands are drawn, as it looks at them."""


@pytest.fixture(autouse=True)
def _commands_draw_where_a_test_looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than most tiny runs; the tests of reports draw the charts of every kind of record."""
    if request.path.parent.name != "cli" or "drawn" in request.fixturenames:
        return
    monkeypatch.setattr(
        charts, "chart_files", lambda found: {f"{c.name}.{e}": b"not drawn" for c in found for e in ("png", "svg")}
    )
    monkeypatch.setattr(to_html, "page_svg", lambda chart, prefix: "")


@pytest.fixture(scope="session")
def tower() -> VisionEncoder:
    """The debug-size Qwen3-VL encoder with seeded random weights, float32 on the CPU."""
    spec = ModelSpec("qwen3-vl-debug", load_format="dummy", device="cpu")
    encoder, _ = load(resolve_source(spec), spec, device=torch.device("cpu"), dtype=torch.float32)
    return encoder


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """torch's compiler without anything compiled before, in this process or on the disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
