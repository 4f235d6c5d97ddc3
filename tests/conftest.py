"""Shared fixtures. GPU tests carry the marker `requires_cuda` and are skipped where torch sees no GPU.

What takes long to import is imported in the fixtures: pytest-xdist's own process reads this file, and runs no test.
"""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder

# An error that nobody foresaw is one line to a user; a test shows where it comes from.
os.environ.setdefault("VITGRAPH_DEBUG", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("requires_cuda"):
            item.add_marker(skip)


VLLM_VERSION = "0.33.0"
VLLM_SOURCE = "VITGRAPH_VLLM_SOURCE"
"""Environment variable with an unpacked source distribution of vLLM, where pip need not fetch one."""


@pytest.fixture(scope="session")
def vllm_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's source distribution. pip unpacks it, and fails at its metadata, which would build vLLM."""
    if VLLM_SOURCE in os.environ:
        return Path(os.environ[VLLM_SOURCE])
    folder = tmp_path_factory.mktemp("vllm")
    options = ("--no-clean", "--no-deps", "--no-binary", "vllm", "--no-build-isolation", "--dest", str(folder))
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options]
    try:
        done = subprocess.run(
            [*command, f"vllm=={VLLM_VERSION}"],
            env={**os.environ, "TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not fetch vLLM {VLLM_VERSION}'s source within 300 s")
    found = next(folder.glob("pip-download-*/*/vllm"), None)
    if found is None:
        pytest.skip(f"pip cannot fetch vLLM {VLLM_VERSION}'s source: {(done.stderr.strip().splitlines() or ['?'])[0]}")
    return found.parent


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
    import typer.main
    import typer.testing

    typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def tower() -> VisionEncoder:
    """The debug-size Qwen3-VL encoder with seeded random weights, float32 on the CPU."""
    return _debug_tower()


@pytest.fixture(scope="session")
def small_tower() -> VisionEncoder:
    """The same for images of as few as four tokens, so that a replay takes a millisecond or two."""
    return _debug_tower(mm_processor_kwargs={"min_pixels": 4096})


def _debug_tower(**settings: Any) -> VisionEncoder:
    import torch

    from vitgraph.measure.setup import load, resolve_source
    from vitgraph.specs.parts import ModelSpec

    spec = ModelSpec("qwen3-vl-debug", load_format="dummy", device="cpu", **settings)
    encoder, _ = load(resolve_source(spec), spec, device=torch.device("cpu"), dtype=torch.float32)
    return encoder


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """torch's compiler without anything compiled before, in this process or on the disk."""
    import torch

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced_only(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are traced and changed as ever, and then run as they are: Inductor's own work takes most of the time."""
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, *_: graph.forward)
