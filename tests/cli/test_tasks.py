"""The ten tasks of docs/tasks.md, run one after the other as they stand, print what the page says."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked_programs import forked_program
from PIL import Image
from safetensors.torch import save_file

import vitgraph
from vitgraph.models.registry import resolve_preset

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
TASKS = re.findall(r"^## (\d+\. .*?)\n.*?^```bash\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SIZES = ((640, 480), (336, 336), (1024, 768), (800, 600), (400, 300), (1280, 720))


def write_fine_tune(folder: Path) -> None:
    """A checkpoint of the debug tower under the published names."""
    source = resolve_preset("qwen3-vl-debug")
    assert source is not None
    folder.mkdir()
    # The tower's own tensors are widened where that is faster; a checkpoint has them as they were published.
    sys.path.append(str(ROOT / "tests" / "unit" / "models"))
    encoder_checks = importlib.import_module("encoder_checks")
    encoder = vitgraph.load_encoder("qwen3-vl-debug", load_format="dummy", device="cpu", seed=3)
    state = encoder_checks.stock_state(encoder)
    tensors = {f"model.{name}": tensor.detach().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": [source.architecture], "text_config": {"hidden_size": 64}}
    (folder / "config.json").write_text(json.dumps({**config, "vision_config": dict(source.vision_config)}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the files that the tasks start from."""
    folder = tmp_path
    lines = [f'1.2.3.4 - - "POST /v1" 200 size={w}x{h}\n' for _ in range(20) for w, h in SIZES]
    (folder / "access.log").write_text("".join(lines))
    (folder / "photos").mkdir()
    for number, size in enumerate(SIZES):
        Image.new("RGB", size).save(folder / "photos" / f"{number}.jpg")
    (folder / "lmarena-ai" / "VisionArena-Chat").mkdir(parents=True)
    image = {"bytes": (folder / "photos" / "1.jpg").read_bytes(), "path": None}
    pq.write_table(pa.table({"images": [[image]] * 20}), folder / "lmarena-ai" / "VisionArena-Chat" / "part.parquet")
    write_fine_tune(folder / "my-finetune")
    return folder


def test_there_are_ten() -> None:
    assert [title.split(".")[0] for title, _, _ in TASKS] == [str(number) for number in range(1, 11)]


@pytest.mark.slow
def test_each_task_prints_what_the_page_says(place: Path) -> None:
    """One test: a task takes what those before it left, and tests that run side by side share no folder."""
    sys.path.append(str(ROOT / "tests" / "drills"))
    every_command = importlib.import_module("every_command")
    every_command.load_modules("bench")
    (place / "bin").mkdir()
    (place / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (place / "bin" / "python").chmod(0o755)
    environment = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    with forked_program(place / "bin", every_command.run_main):
        for title, script, printed in TASKS:
            ran = subprocess.run(
                ["bash", "-ec", script], cwd=place, env=environment, capture_output=True, text=True, check=False
            )
            assert ran.returncode == 0, f"{title}: {ran.stdout}{ran.stderr}"
            said = " ".join(f"{ran.stdout} {ran.stderr}".split())
            for line in printed.splitlines():
                assert " ".join(line.split()) in said, f"{title}: {ran.stdout}{ran.stderr}"
