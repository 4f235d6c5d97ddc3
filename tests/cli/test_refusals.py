"""What a run refuses, `--dry-run` refuses: with the same text and status, and neither leaves a folder behind."""

from __future__ import annotations

import functools
import json
import socket
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vitgraph import hub
from vitgraph.cli import app
from vitgraph.commands.options import specs_of_commands
from vitgraph.specs.fields import options_of

SPECS = specs_of_commands(app)
OF_FILES = {"sweep"}
"""Commands that are asked by a file, whose own tests do this."""

COMMANDS = [name for name, spec in SPECS.items() if "dry_run" in options_of(spec) and name not in OF_FILES]
BASE = {"model": "qwen3-vl-debug", "load_format": "dummy", "device": "cpu", "num_prompts": "2"}
"""What is given where a kind of bad input gives nothing else, of the options that a command has."""

BAD: dict[str, dict[str, str]] = {
    "unknown model": {"model": "qwen9-vl"},
    "model folder without a config": {"model": "empty"},
    "model folder without weights": {"model": "weightless", "load_format": "auto"},
    "unknown dtype": {"dtype": "float8"},
    "unknown device": {"device": "gpu"},
    "no such device": {"device": "cuda:7"},
    "unknown backend": {"mm_encoder_attn_backend": "FLASH_ATN"},
    "backend of a GPU": {"mm_encoder_attn_backend": "FLASH_ATTN"},
    "flash attention of another backend": {"mm_encoder_attn_backend": "TORCH_SDPA", "flash_attn_version": "3"},
    "unknown load format": {"load_format": "dumy"},
    "unknown processor setting": {"mm_processor_kwargs": '{"max_pixls": 100}'},
    "output folder that cannot be made": {"output_dir": "/proc/nope/x", "output": "/proc/nope/x.json"},
    "output folder below a file": {"output_dir": "a-file/x", "output": "a-file/x.json"},
    "output folder that is a file": {"output_dir": "a-file"},
    "output folder with a record": {"output_dir": "recorded"},
    "output file that is there": {"output": "a-file"},
    "unknown packing": {"packing": "gready"},
    "packing without its calibration": {"packing": "optimal"},
    "budget below every item": {"token_budgets": "1"},
    "items that do not fit": {"token_budgets": "64", "max_vision_items_per_batch": "1000"},
    "no such calibration": {"calibration": "nowhere.json"},
    "damaged calibration": {"calibration": "a-file"},
    "no such trace": {"dataset_path": "nowhere.csv"},
    "damaged trace": {"dataset_path": "a-file"},
    "no such data set": {"dataset_name": "hf", "dataset_path": "./nowhere"},
    "unknown kind of workload": {"dataset_name": "random"},
    "option of another workload": {"video_fps": "30", "dataset_name": "random-mm"},
    "item that the processor refuses": {"items": "1x4000"},
    "one path and a monolithic graph": {"baseline": "monolithic"},
    "ranks without their devices": {"tensor_parallel_size": "3", "mm_encoder_tp_mode": "data", "device": "cuda"},
    "arrivals that a trace does not have": {"request_rate": "trace", "calibration": "h200-qwen3-vl-30b-a3b"},
    "unknown objective": {"objective": "speed"},
    "unknown target": {"target": "tgi"},
    "unknown backend to compare": {"backends": "TORCH_SDPA,FLASH"},
    "backend to compare twice": {"backends": "TORCH_SDPA,TORCH_SDPA"},
    "no such config": {"config": "nowhere.yaml"},
    "damaged config": {"config": "a-file"},
    "config with an unknown key": {"config": "unknown.yaml"},
}  # fmt: skip
OF_OTHERS = {
    ("tune-budgets", "model folder without weights"): "it predicts where there is no GPU",
    ("recommend", "model folder without weights"): "it predicts where there is no GPU",
    ("verify", "budget below every item"): "that nothing is replayed is what it finds",
}
"""What is no bad input to a command."""

CASES = [
    (command, kind)
    for command in COMMANDS
    for kind, options in BAD.items()
    if (command, kind) not in OF_OTHERS
    if set(options) & (set(options_of(SPECS[command])) - set(BASE)) or set(options) <= set(BASE)
]
ALWAYS = {"unknown model", "output folder with a record", "no such calibration", "unknown packing", "no such trace"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with what the options name."""
    (tmp_path / "a-file").write_text("no,thing\nof: use\n")
    (tmp_path / "unknown.yaml").write_text("num_promts: 3\n")
    (tmp_path / "recorded").mkdir()
    (tmp_path / "recorded" / "run.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "weightless").mkdir()
    tower = {"depth": 1, "hidden_size": 64, "num_heads": 1, "intermediate_size": 64, "out_hidden_size": 64}
    tower["deepstack_visual_indexes"] = []
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": tower}
    (tmp_path / "weightless" / "config.json").write_text(json.dumps(config))
    (tmp_path / "weightless" / "preprocessor_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(command: str, kind: str) -> list[str]:
    options = options_of(SPECS[command])
    given = {**BASE, **BAD[kind]}
    return [word for name, value in given.items() if name in options for word in (options[name].names[0], value)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="backends and devices of a GPU are there")
@pytest.mark.parametrize(
    ("command", "kind"),
    [pytest.param(*case, marks=() if case[1] in ALWAYS else pytest.mark.slow) for case in CASES],
    ids=[f"{command}: {kind}" for command, kind in CASES],
)
def test_a_dry_run_refuses_what_a_run_refuses(command: str, kind: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    ran, dry = (
        CliRunner().invoke(app, [command, *words_of(command, kind), *more])
        for more in (["--quiet"], ["--quiet", "--dry-run"])
    )
    assert ran.exit_code == 2, ran.output
    assert ran.stderr.startswith("error: "), ran.stderr
    assert (dry.exit_code, dry.stderr, dry.stdout) == (ran.exit_code, ran.stderr, ran.stdout) == (2, ran.stderr, "")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "owner/model"],
        ["--model", "qwen3-vl-debug", "--dataset-name", "hf", "--dataset-path", "owner/images"],
        ["--model", "qwen3-vl-8b", "--load-format", "auto", "--num-prompts", "2"],
    ],
    ids=["model", "data set", "weights"],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry"])
def test_a_hub_that_does_not_answer_ends_a_run_at_once(
    words: list[str], dry: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own library would ask again and again for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(hub, "check_hub", functools.partial(hub.check_hub, timeout_s=0.2))
        hub.hub_problem.cache_clear()
        try:
            result = CliRunner().invoke(app, ["bench", "--device", "cpu", *words, *dry])
            assert result.exit_code == 6, result.output
            assert "no answer within 0.2 s" in result.stderr or "timed out" in result.stderr
        finally:
            hub.hub_problem.cache_clear()
    assert not (folder / "runs").exists()
