"""`calibrate`, `tune-budgets` and `plan` as a user runs them, on a CPU and with the shipped profile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vitgraph.cli import app
from vitgraph.commands import tuning
from vitgraph.predict.profile import load_profile, shipped_profiles
from vitgraph.records import store

PROFILE = "h200-qwen3-vl-30b-a3b"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def tune(tmp_path: Path, *arguments: str) -> Any:
    return run(
        "tune-budgets", "--model", "qwen3-vl-30b-a3b", "--num-prompts", "300", "--no-verify", "--quiet",
        "--requests-per-call", "1", "--output-dir", str(tmp_path / "tuned"), *arguments,
    )  # fmt: skip


def test_every_shipped_profile_is_a_measured_one() -> None:
    assert PROFILE in shipped_profiles()
    for path in shipped_profiles().values():
        profile = load_profile(path)
        assert not profile.is_synthetic
        assert not profile.is_cpu
        assert profile.holdout


@pytest.mark.slow
def test_a_tuned_list_beats_the_baselines_and_is_saved(tmp_path: Path) -> None:
    result = tune(tmp_path, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert {"token_budgets", "max_vision_items_per_batch", "max_frames_per_batch", "packing"} <= set(
        data["result"]["best"]["settings"]
    )
    data, result = data["result"], data["result"]["best"]["latency"]
    eager, automatic = data["baselines"]["eager"], data["baselines"]["automatic"]["latency"]
    assert result["mean_ms"] <= min(eager["mean_ms"], automatic["mean_ms"])
    assert data["measured"] is None
    config = json.loads(data["compilation_config"])
    assert config["cudagraph_mm_encoder"] is True
    assert json.loads((tmp_path / "tuned" / "run.json").read_text())["kind"] == "tune-budgets"
    for name in ("settings.csv", "budgets.csv", "plots/pareto.png"):
        assert (tmp_path / "tuned" / name).stat().st_size > 0


@pytest.mark.slow
def test_a_full_disk_costs_the_file_and_not_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fill_up)
    result = tune(tmp_path, "--num-prompts", "40")
    assert result.exit_code == 1
    assert "--compilation-config" in result.stdout
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "No space left on device" in line and "run.json" in line


@pytest.mark.slow
def test_a_stop_before_the_measuring_leaves_the_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "is_on_gpu", lambda device: True)
    monkeypatch.setattr(tuning, "_measure", stop)
    arguments = ["tune-budgets", "--model", "qwen3-vl-30b-a3b", "--num-prompts", "40", "--quiet", "--json"]
    result = run(*arguments, "--output-dir", str(tmp_path / "tuned"))
    assert result.exit_code == 130
    data = json.loads(result.stdout)
    assert (data["status"], data["result"]["measured"]) == ("interrupted", None)
    assert store.read_record(tmp_path / "tuned").status == "interrupted"


def test_limits_are_kept(tmp_path: Path) -> None:
    result = tune(tmp_path, "--json", "--max-graphs", "6")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["result"]["best"]["graphs"] <= 6


@pytest.mark.slow
def test_the_table_ends_with_what_to_paste(tmp_path: Path) -> None:
    result = tune(tmp_path)
    assert '--compilation-config \'{"cudagraph_mm_encoder": true' in result.stdout
    assert "vllm serve Qwen/Qwen3-VL-30B-A3B-Instruct" in result.stdout
    assert "model error" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--calibration", "no-such-profile.json"], "no-such-profile.json: no such file, nor one of h200-"),
        (["--max-graphs", "0"], "--max-graphs is 0"),
        (["--objective", "speed"], "speed"),
        (["--target", "sglang"], "sglang"),
        (["--model", "qwen2-vl-7b"], "vitgraph calibrate --model qwen2-vl-7b"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, arguments: list[str], named: str) -> None:
    result = tune(tmp_path, *arguments)
    assert result.exit_code == 2, result.stdout
    assert named in result.stderr


def test_a_backend_of_the_gpu_to_serve_on_can_be_asked_for_without_one(tmp_path: Path) -> None:
    """Options of a server's line are taken on a laptop, where nothing of them runs."""
    asked = tune(tmp_path, "--mm-encoder-attn-backend", "FLASH_ATTN", "--num-prompts", "40", "--json")
    assert asked.exit_code == 0, asked.stderr
    assert json.loads(asked.stdout)["result"]["verdict"] != "measure_first"
    unknown = tune(tmp_path, "--mm-encoder-attn-backend", "FLASH_ATN", "--overwrite")
    assert unknown.exit_code == 2 and "unknown attention backend 'FLASH_ATN'" in unknown.stderr


def test_a_record_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "run.json").write_text("{}")
    again = tune(tmp_path)
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr


def test_plan_shows_where_each_item_goes() -> None:
    sizes = "336x336,1024x768,8000x8000"
    arguments = ["plan", "--model", "qwen3-vl-30b-a3b", "--items", sizes, "--token-budgets", "512,1024"]
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["counts"]["hits"], data["counts"]["misses"]) == (2, 1)
    assert data["counts"]["misses_by_reason"] == {"too_many_tokens": 1}
    timed = json.loads(run(*arguments, "--json", "--calibration", PROFILE).stdout)
    assert timed["predicted"] is not None


@pytest.mark.parametrize("items", ["336", "axb", "0x4", "1x2x3x4"])
def test_plan_refuses_sizes_that_are_none(items: str) -> None:
    result = run("plan", "--model", "qwen3-vl-30b-a3b", "--items", items)
    assert result.exit_code == 2
    assert "336x336" in result.stderr


def test_plan_counts_the_paths_of_a_model_with_two() -> None:
    result = run("plan", "--model", "deepseek-ocr", "--items", "512x512,1280x1280", "--json")
    assert result.exit_code == 0, result.output
    paths = {row["path"]: row for row in json.loads(result.stdout)["counts"]["per_path"]}
    assert {path: (row["items"], row["hits"], row["replays"]) for path, row in paths.items()} == {
        "global": (2, 2, 1),
        "local": (1, 1, 1),
    }
    assert paths["local"]["tokens_replayed"] == 400
    shown = run("plan", "--model", "deepseek-ocr", "--items", "512x512,1280x1280")
    assert "Encoder paths" in shown.stdout


def test_optimal_packing_needs_a_calibration_and_never_packs_for_worse() -> None:
    without = run("bench", "--model", "qwen3-vl-30b-a3b", "--packing", "optimal", "--dry-run", "--num-prompts", "20")
    assert without.exit_code == 2
    assert "--calibration" in without.stderr
    result = run(
        "bench", "--model", "qwen3-vl-30b-a3b", "--packing", "optimal", "--calibration", PROFILE, "--dry-run", "--json",
        "--num-prompts", "300", "--token-budgets", "512,4096", "--load-format", "dummy",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["expected"]["misses_by_reason"].keys() >= {"eager_is_faster"}


@pytest.mark.slow
def test_calibrate_writes_a_profile_that_tuning_takes(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    result = run(
        "calibrate", "--model", "qwen3-vl-debug", "--load-format", "dummy", "--device", "cpu", "--output", str(path),
        "--max-num-batched-tokens", "200", "--time-limit", "2", "--quiet",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert load_profile(path).is_cpu
    tuned = run(
        "tune-budgets", "--model", "qwen3-vl-debug", "--calibration", str(path), "--num-prompts", "20",
        "--mm-processor-kwargs", '{"max_pixels": 100000}', "--no-verify", "--quiet", "--json",
        "--output-dir", str(tmp_path / "tuned"),
    )  # fmt: skip
    assert tuned.exit_code == 0, tuned.stderr


@pytest.mark.slow
def test_tuning_imports_no_torch(tmp_path: Path) -> None:
    """A laptop without a GPU tunes from a file and shows a plan with its predicted times."""
    program = (
        "import contextlib, sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers'):\n"
        "            raise ImportError('blocked: ' + name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from vitgraph.cli import app\n"
        f"planned = ['plan', *sys.argv[2:4], '--items', '336x336', '--calibration', {PROFILE!r}]\n"
        "with contextlib.redirect_stdout(sys.stderr): app(planned, standalone_mode=False)\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
    )
    command = [
        sys.executable, "-c", program, "tune-budgets", "--model", "qwen3-vl-30b-a3b", "--num-prompts", "50",
        "--no-verify", "--quiet", "--json", "--requests-per-call", "1", "--output-dir", str(tmp_path / "tuned"),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["result"]["best"]["settings"]["token_budgets"]


@pytest.mark.slow
def test_a_run_says_where_it_is_not_what_was_calibrated(tmp_path: Path) -> None:
    result = run(
        "bench", "--model", "qwen3-vl-debug", "--load-format", "dummy", "--device", "cpu", "--packing", "optimal",
        "--calibration", PROFILE, "--num-prompts", "2", "--num-warmups", "1", "--token-budgets", "2048",
        "--dataset-name", "random-mm", "--random-mm-bucket-config", '{"(96,64,1)": 1.0}', "--rounds", "1",
        "--output-dir", str(tmp_path / "run"),
    )  # fmt: skip
    environment = store.read_record(tmp_path / "run").environment
    differences = (environment.calibration_differences if environment else None) or ()
    (device,) = (text for text in differences if text.startswith("the device was "))
    assert "NVIDIA H200" in device
    assert device in " ".join(result.stderr.split())
    # One budget of 2048 is far too large for any image, so that eager is the better answer, and no failure.
    assert result.exit_code == 0
    assert "predicts eager to be faster for all 2 items" in " ".join(result.stderr.split())
    assert "0 hits" in result.stdout or "0 of 2" in result.stdout
