"""Compiling the repeated block: where its code is kept, what it took, and calls that reach every path of a tower."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_checks import debug_encoder
from rows_of_a_kind import each_row

from vitgraph.errors import ModelError
from vitgraph.measure.correctness import relative_l2
from vitgraph.measure.setup import load, resolve_source
from vitgraph.models import compilation
from vitgraph.models.compilation import (
    CACHE_VARIABLE,
    SWITCH_VARIABLES,
    compile_blocks,
    compile_facts,
    default_cache_folder,
    sample_calls,
    use_disk_cache,
)
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.registry import ModelRow
from vitgraph.specs.parts import ModelSpec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test may write into the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for name in (CACHE_VARIABLE, *SWITCH_VARIABLES):
        # Set first, so that what a test sets itself is taken back too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def encoder_of(preset: str, **settings: Any) -> tuple[VisionEncoder, Any]:
    spec = ModelSpec(preset, load_format="dummy", device="cpu", **settings)
    return load(resolve_source(spec), spec, device=CPU, dtype=torch.float32)


def test_the_cache_is_a_folder_that_outlives_the_run(tmp_path: Path) -> None:
    folder = use_disk_cache()
    assert folder == default_cache_folder() == tmp_path / "xdg" / "vitgraph" / "compiled"
    assert folder.is_dir()
    assert os.environ[CACHE_VARIABLE] == str(folder)
    assert [os.environ[name] for name in SWITCH_VARIABLES] == ["1", "1"]


def test_libraries_that_a_killed_run_cut_off_are_built_again(tmp_path: Path) -> None:
    folder = tmp_path / "xdg" / "vitgraph" / "compiled" / "ab"
    folder.mkdir(parents=True)
    # As linkers write one: the table of three sections of 64 bytes comes last.
    whole = struct.pack("<5s35xQ10xHH2x", b"\x7fELF\x02", 1000, 64, 3) + bytes(936 + 192)
    for name, size in (("whole", len(whole)), ("cut", len(whole) - 1), ("short", 10), ("empty", 0), ("young", 10)):
        (folder / f"{name}.so").write_bytes(whole[:size])
        if name != "young":
            os.utime(folder / f"{name}.so", (0, 0))
    use_disk_cache()
    assert sorted(file.stem for file in folder.iterdir()) == ["whole", "young"]


def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "mine"))
    monkeypatch.setenv(SWITCH_VARIABLES[0], "0")
    assert use_disk_cache() == tmp_path / "mine"
    assert os.environ[SWITCH_VARIABLES[0]] == "0"


def test_torchs_own_default_in_the_environment_is_no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(CACHE_VARIABLE, default_cache_dir())
    assert use_disk_cache() == default_cache_folder()


def test_a_home_that_cannot_be_written_stops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert use_disk_cache() is None
    assert CACHE_VARIABLE not in os.environ


@pytest.mark.slow
def test_loading_a_compiled_tower_compiles_once_and_says_what_it_took(traced_only: None) -> None:
    plain, plain_facts = encoder_of("qwen3-vl-debug")
    compiled, compiled_facts = encoder_of("qwen3-vl-debug", compile=True)
    assert plain_facts.compiled is None
    facts = compiled_facts.compiled
    assert facts is not None and facts.blocks == len(compiled.repeated_blocks())
    assert facts.seconds is not None and facts.seconds > 0
    # All layers share one block; a second length may cost a second compilation, but no layer does.
    assert 1 <= facts.compilations <= 2
    assert facts.cache_dir == os.environ[CACHE_VARIABLE]
    for side in (96, 256):
        item = plain.rule.image_geometry(side, side + 32)
        inputs = plain.make_inputs([item], plain.random_pixels(plain.rule.pixel_rows(item), 1))
        with torch.inference_mode():
            assert relative_l2(compiled.encoder_eager_forward(inputs), plain.encoder_eager_forward(inputs)) <= 1e-5
    assert compile_facts()["compilations"] == facts.compilations


@pytest.mark.slow
def test_each_tower_is_counted_for_itself(traced_only: None) -> None:
    first, _ = encoder_of("qwen3-vl-debug", compile=True)
    second, _ = encoder_of("qwen3-vl-debug")
    compile_blocks(second)
    assert (compile_facts()["seconds"], compile_facts()["compilations"]) == (0.0, 0)
    assert len(first.repeated_blocks()) == len(second.repeated_blocks())


def test_nothing_compiled_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_clock", None)
    assert compile_facts() == {}


def test_a_tower_without_repeated_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, _ = encoder_of("qwen3-vl-debug")
    monkeypatch.setattr(encoder, "repeated_blocks", list)
    with pytest.raises(ModelError, match="leave --compile out"):
        compile_blocks(encoder)


@pytest.mark.parametrize("row", each_row())
def test_sample_calls_run_on_every_path_of_every_row(row: ModelRow) -> None:
    encoder = debug_encoder(row.name)
    paths = []
    with torch.inference_mode():
        for inputs, path in sample_calls(encoder):
            paths.append(path)
            assert encoder.encoder_eager_forward(inputs, path).isfinite().all()
    assert set(paths) == set(encoder.get_encoder_cudagraph_config().paths)
    assert encoder.repeated_blocks()
