"""`vitgraph workload` as a user runs it: inspect, make, convert, and traces that replay elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from vitgraph.cli import app

DEBUG_MODEL = ("--model", "qwen3-vl-debug", "--load-format", "dummy")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["workload", *arguments])


def bench_facts(trace: Path) -> dict[str, Any]:
    options = [*DEBUG_MODEL, "--dataset-path", str(trace), "--num-warmups", "0", "--dry-run", "--json"]
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["workload"]


def test_inspect_shows_the_whole_shipped_trace_by_default() -> None:
    result = run("inspect")
    assert result.exit_code == 0, result.stderr
    assert "3,300 requests · 3,300 images · 0 videos" in result.stdout
    assert "not a measurement of traffic" in " ".join(result.stdout.split())
    assert "Output tokens with qwen3-vl-30b-a3b (qwen3_vl)" in result.stdout


def test_inspect_counts_tokens_with_every_model_named_once() -> None:
    models = ("--model", "internvl3.5-8b", "--model", "qwen2.5-vl-7b", "--model", "internvl3.5-8b")
    result = run("inspect", *models, "--dataset-path", "documents", "--num-prompts", "40", "--json")
    facts = json.loads(result.stdout)
    assert [model["model"] for model in facts["models"]] == ["internvl3.5-8b", "qwen2.5-vl-7b"]
    assert {model["tokens_per_item"]["n"] for model in facts["models"]} == {40}


def test_inspect_takes_processor_overrides_and_bounds_of_pixels() -> None:
    most = []
    for extra in ((), ("--mm-processor-kwargs", '{"max_pixels": 300000}'), ("--max-pixels-per-item", "200000")):
        facts = json.loads(run("inspect", "--num-prompts", "200", "--json", *extra).stdout)
        most.append(facts["models"][0]["tokens_per_item"]["max"])
    assert most[0] > 300000 / 32**2 >= most[1] > 200000 / 32**2 >= most[2] - 30


def test_inspect_writes_its_facts_and_plots_once(tmp_path: Path) -> None:
    options = ("inspect", "--dataset-name", "random-mm", "--num-prompts", "20", "--output-dir", str(tmp_path / "out"))
    assert run(*options).exit_code == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"workload.json", "sizes.png", "sizes.svg", "tokens.png", "tokens.svg"}
    assert json.loads((tmp_path / "out" / "workload.json").read_text())["items"] == 20
    again = run(*options)
    assert (again.exit_code, "--overwrite" in again.stderr) == (2, True)
    assert run(*options, "--overwrite").exit_code == 0


def test_a_made_trace_holds_what_random_mm_draws(tmp_path: Path) -> None:
    trace = tmp_path / "made.csv"
    draw = (
        "--num-prompts", "30", "--seed", "7", "--random-mm-base-items-per-request", "2", "--random-mm-bucket-config",
        '{"(64,96,1)": 0.5, "(64,96,60)": 0.5}', "--random-mm-limit-mm-per-prompt", '{"image": 2, "video": 2}',
    )  # fmt: skip
    result = run("make", "--output", str(trace), *draw)
    assert result.exit_code == 0, result.stderr
    drawn = CliRunner().invoke(
        app, ["bench", *DEBUG_MODEL, "--dataset-name", "random-mm", *draw, "--dry-run", "--json"]
    )
    expected = json.loads(drawn.stdout)["workload"]
    replayed = bench_facts(trace)
    assert replayed["fingerprint"] == expected["fingerprint"]
    assert (replayed["requests"], replayed["videos"]) == (30, expected["videos"])
    assert expected["videos"] > 0
    assert f"fingerprint {expected['fingerprint']}" in " ".join(result.stdout.split())


def test_a_converted_folder_replays_without_its_images(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (640, 480)).save(photos / "a.png")
    (photos / "b.png").write_bytes(b"damaged")
    trace = tmp_path / "photos.csv"
    result = run("convert", str(photos), "--output", str(trace))
    assert result.exit_code == 0
    assert "b.png" in result.stdout
    assert f"vitgraph bench --dataset-name trace --dataset-path {trace}" in result.stdout
    assert trace.read_text().splitlines()[1] == "640,480,1,0"
    (photos / "a.png").unlink()
    assert bench_facts(trace)["items"] == 1


def test_a_converted_log_says_how_many_lines_named_no_size(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text('"POST /v1" 200 size=640x480\n"GET /health" 200\n')
    result = run("convert", str(log), "--pattern", "size=WxH", "--output", str(tmp_path / "t.csv"))
    assert "1 line of 2 named no size" in result.stdout
    facts = json.loads(
        run("convert", str(log), "--pattern", "size=WxH", "--output", str(tmp_path / "u.csv"), "--json").stdout
    )
    assert (facts["requests"], facts["provenance"]["lines_without_size"]) == (1, 1)
    assert facts["fingerprint"] == bench_facts(tmp_path / "u.csv")["fingerprint"]


@pytest.mark.parametrize("command", [("make",), ("convert", "missing-source/nothing.log")])
def test_a_trace_is_not_replaced_unasked_nor_its_source_read(command: tuple[str, ...], tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("mine")
    result = run(*command, "--output", str(trace))
    assert result.exit_code == 2
    assert "t.csv exists; results are not replaced. Use --overwrite" in result.stderr
    assert trace.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("inspect", "--model", "gpt-17"), "`vitgraph models` lists the presets"),
        (("inspect", "--dataset-path", "none.csv"), "none.csv"),
        (("inspect", "--mm-processor-kwargs", '{"colour": 1}'), "colour"),
        (("inspect", "--num-prompts", "0"), "--num-prompts is 0"),
        (("make", "--output", "x.csv", "--random-mm-bucket-config", "{}"), "--random-mm-bucket-config"),
        (("convert", "none.log", "--output", "x.csv"), "none.log does not exist"),
    ],
)
def test_what_cannot_be_done_ends_with_2_and_a_way_out(
    arguments: tuple[str, ...], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert "Traceback" not in result.stderr
