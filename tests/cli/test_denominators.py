"""What a workload brought and the model refused stays in every count: of plan, tune-budgets, a record and inspect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.unit.workloads.test_workload_images import encode, write_images
from vitgraph.cli import app

QWEN = ["--model", "qwen2.5-vl-debug"]
SIZES = "width,height,frames,request\n2000,9,1,0\n640,480,1,0\n5,5,1,1\n2001,9,1,2\n640,360,3,3\n"
PROFILE = Path(__file__).parents[1] / "data" / "synthetic-profile.json"


def run(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.fixture
def trace(tmp_path: Path) -> list[str]:
    path = tmp_path / "sizes.csv"
    path.write_text(SIZES)
    return ["--dataset-name", "trace", "--dataset-path", str(path)]


def test_plan_counts_what_it_refuses(trace: list[str]) -> None:
    shown, said = run("plan", *QWEN, *trace)
    assert "3 hits, 0 misses, 2 refused of 5 items" in shown
    assert "2 of 5 items of the workload" in said and "aspect ratio" in said
    workload = json.loads(run("plan", *QWEN, *trace, "--json")[0])["workload"]
    assert (workload["requests"], workload["requests_brought"]) == (3, 4)
    assert (workload["items"], workload["items_brought"], len(workload["skipped"])) == (3, 5, 2)


def test_a_dry_run_counts_what_it_refuses(trace: list[str]) -> None:
    shown, _ = run("bench", *QWEN, *trace, "--dry-run", "--device", "cpu", "--load-format", "dummy")
    assert "3 of 4 requests, 3 of 5 items" in shown


def test_tune_budgets_says_what_it_refuses(trace: list[str], tmp_path: Path) -> None:
    folder = str(tmp_path / "tuned")
    shown, _ = run(
        "tune-budgets", "--model", "qwen3-vl-debug", *trace, "--calibration", str(PROFILE), "--device", "cpu",
        "--requests-per-call", "1", "--quiet", "--output-dir", folder,
    )  # fmt: skip
    assert "2 of 5 items of the workload" in " ".join(shown.split())


def test_inspect_repeats_no_rows(tmp_path: Path) -> None:
    path = write_images(tmp_path / "a.parquet", [[(encode(8 + index, 8), None)] for index in range(3)])
    found = json.loads(
        run("workload", "inspect", "--dataset-name", "hf", "--dataset-path", str(path), *QWEN, "--json")[0]
    )
    assert (found["requests"], found["items"], found["provenance"]["requests_repeated"]) == (3, 3, 0)


def test_convert_names_what_it_leaves_out(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (6, 4)).save(photos / "a.png")
    (photos / "b.png").write_bytes(b"junk")
    found = json.loads(run("workload", "convert", str(photos), "-o", str(tmp_path / "o.csv"), "--json")[0])
    assert (found["items"], [item["source"] for item in found["skipped"]]) == (1, ["b.png"])
