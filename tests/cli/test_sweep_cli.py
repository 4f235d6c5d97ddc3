"""`vitgraph sweep`: every run has its folder and its row, what is whole is not run again, what fails ends no other."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vitgraph.cli import app
from vitgraph.errors import UsageError
from vitgraph.measure import processes
from vitgraph.records.record import version_of_code
from vitgraph.records.store import ResultFolder
from vitgraph.report import documents

ROOT = Path(__file__).parents[2]
SETTINGS = """
  model: qwen3-vl-debug
  load_format: dummy
  device: cpu
  num_prompts: 3
  num_warmups: 1
  rounds: 1
  mm_processor_kwargs: {max_pixels: 100000}
  token_budgets: [64, 128]
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that were started, each of them in this process, which is faster."""
    names: list[str] = []

    def run(command: Sequence[str], folder: Path) -> tuple[bool, int]:
        assert list(command[1:3]) == ["-m", "vitgraph"]
        names.append(folder.name)
        result = CliRunner().invoke(app, list(command[3:]))
        (folder / processes.STDERR_FILE).write_text(result.stderr)
        return result.exit_code == 130, result.exit_code

    monkeypatch.setattr(processes, "run_process", run)
    return names


def sweep(folder: Path, text: str, *words: str) -> Any:
    file = folder / "packings.yaml"
    file.write_text(text)
    return CliRunner().invoke(app, ["sweep", str(file), "--output-dir", str(folder / "out"), *words])


@pytest.mark.slow
def test_every_run_has_a_row_and_the_table_a_figure_of_each(tmp_path: Path, started: list[str]) -> None:
    text = f"settings:{SETTINGS}axes:\n  packing: [greedy, exact]\nruns:\n- {{packing: optimal}}\n"
    dry = sweep(tmp_path, text, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "3 not run" in dry.stdout and not (tmp_path / "out").exists()
    result = sweep(tmp_path, text)
    # exact finds no budget of exactly these sizes; optimal needs a calibration.
    assert result.exit_code == 1, result.output
    assert "2 of 3 runs failed: packing=exact" in result.stderr
    with (tmp_path / "out" / "export" / "sweep.csv").open() as file:
        rows = {row["run"].rpartition("-")[0]: row for row in csv.DictReader(file)}
    assert {name: (row["status"], row["exit_status"]) for name, row in rows.items()} == {
        "packing=greedy": ("complete", "0"), "packing=exact": ("failed", "3"), "packing=optimal": ("failed", "2"),
    }  # fmt: skip
    assert "--calibration" in rows["packing=optimal"]["found"]
    assert "No verdict: replayed on a CPU" in rows["packing=greedy"]["found"]
    assert len(started) == 3
    # The record of `exact` is whole and says what it is; only what has none is run again.
    again = sweep(tmp_path, text)
    assert again.exit_code == 1
    assert [name.rpartition("-")[0] for name in started[3:]] == ["packing=optimal"]
    assert "Figures of the benches that are complete" in again.stdout
    changed = sweep(tmp_path, text.replace("num_prompts: 3", "num_prompts: 2").replace("packing: optimal", "seed: 1"))
    assert changed.exit_code == 3, "all that failed ended with 3"
    assert len(started) == 7, "a setting of all runs makes other runs"


def test_a_stop_keeps_what_there_is_and_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "run_process", lambda command, folder: (True, 130))
    result = sweep(tmp_path, f"settings:{SETTINGS}axes:\n  seed: [1, 2]\n", "--json")
    assert result.exit_code == 130
    assert [run["status"] for run in json.loads(result.stdout)["runs"]] == ["interrupted", "not run"]


def test_a_sweep_keeps_its_folder_until_its_tables_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def write(*_: Any, **__: Any) -> None:
        with pytest.raises(UsageError) as error:
            ResultFolder(tmp_path / "out", overwrite=True)
        refused.append(str(error.value))

    monkeypatch.setattr(processes, "run_process", lambda *_: (False, 0))
    monkeypatch.setattr(documents, "write", write)
    assert sweep(tmp_path, f"settings:{SETTINGS}axes: {{seed: [1]}}\n").exit_code == 0
    assert len(refused) == 1 and refused[0].startswith("another vitgraph is writing")


def test_a_command_whose_result_is_a_file_is_swept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, version = [], [version_of_code()]

    def calibrate(command: Sequence[str], folder: Path) -> tuple[bool, int]:
        options = json.loads((folder / "options.json").read_text())
        runs.append(options["model"])
        profile = json.loads((ROOT / "tests" / "data" / "synthetic-profile.json").read_text())
        Path(options["output"]).write_text(json.dumps(profile | {"vitgraph_version": version[0]}))
        return False, 0

    monkeypatch.setattr(processes, "run_process", calibrate)
    text = "command: calibrate\naxes:\n  model: [qwen3-vl-debug, qwen2-vl-debug]\n"
    for _ in range(2):
        assert sweep(tmp_path, text).exit_code == 0
    assert runs == ["qwen3-vl-debug", "qwen2-vl-debug"]
    sweep(tmp_path, text, "--time-limit", "1e-9")
    assert len(runs) == 2
    version[0] = "0.1.0+of.other.code"
    sweep(tmp_path, text.replace("axes:", "axes:\n  seed: [1]"))
    late = sweep(tmp_path, text.replace("axes:", "axes:\n  seed: [1]"), "--time-limit", "1e-9")
    assert len(runs) == 4, "measured by other code, they are to be run again"
    assert late.exit_code == 0
    assert "the time was up before 2 of 2 runs began; run the sweep again" in " ".join(late.stderr.split())


@pytest.mark.slow
def test_the_runs_of_a_sweep_may_be_of_several_commands(tmp_path: Path, started: list[str]) -> None:
    model = "model: qwen3-vl-debug, load_format: dummy, device: cpu, token_budgets: [128]"
    media = "num_prompts: 2, num_warmups: 1, rounds: 1, mm_processor_kwargs: {max_pixels: 100000}"
    text = f"runs:\n- {{command: verify, {model}, calls: 1}}\n- {{{model}, {media}}}\n"
    result = sweep(tmp_path, text, "--json")
    assert result.exit_code == 0, result.output
    assert [run["command"] for run in json.loads(result.stdout)["runs"]] == ["verify", "bench"]
    assert [name.partition(",")[0] for name in started] == ["command=verify", "model=qwen3-vl-debug"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "holds nothing; it must be a mapping"),
        ("axes: {packng: [greedy]}", "unknown key 'packng'; did you mean packing?"),
        ("axes: {packing: greedy}", "axes must give each option a list of values"),
        ("axes: {packing: []}", "axes must give each option a list of values"),
        ("axess: {packing: [greedy]}", "unknown key 'axess'; did you mean axes?"),
        ("command: plan\naxes: {seed: [1]}", "command is 'plan'; known: bench"),
        ("settings: [1]\naxes: {seed: [1]}", "settings is [1]; it must be a mapping"),
        ("runs: {seed: 1}", "runs must be a list of mappings"),
        ("settings: {seed: 1}", "names no runs"),
        ("axes: {seed: [-1]}", "--seed is -1"),
        ("axes: {seed: [1, 1]}", "two runs are"),
        ("axes: {output_dir: [a, b]}", "output_dir is what the sweep decides"),
        ("axes: {seed: [1]}\nsettings: {model: ''}", "no model given"),
    ],
)
def test_a_file_that_is_none_is_refused_and_leaves_nothing(tmp_path: Path, text: str, named: str) -> None:
    if text and "settings" not in text:
        text = f"settings: {{model: qwen3-vl-debug}}\n{text}"
    for dry in ([], ["--dry-run"]):
        result = sweep(tmp_path, text, *dry)
        assert result.exit_code == 2, result.output
        assert named in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_processes_of_their_own(tmp_path: Path) -> None:
    result = sweep(tmp_path, f"settings:{SETTINGS}axes:\n  packing: [greedy, optimal]\n", "--json")
    assert result.exit_code == 2
    assert [run["exit_status"] for run in json.loads(result.stdout)["runs"]] == [0, 2]
