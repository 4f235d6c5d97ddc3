"""`vitgraph bench --baseline monolithic` as a user runs it: both sides of one run, and whom it is not for."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_run_folders import read_bench
from typer.testing import CliRunner

from vitgraph.cli import app
from vitgraph.measure.bench import BenchRun
from vitgraph.measure.diagnose import Diagnosis
from vitgraph.models.registry import resolve_model
from vitgraph.models.two_path import MonolithicEncoder
from vitgraph.planning.budgets import GraphKey
from vitgraph.records.sample_table import read_samples
from vitgraph.report.documents import saved_document
from vitgraph.report.markup import to_html

ROOT = Path(__file__).parents[2]
MODELS = ("deepseek-ocr-debug", "step3-vl-debug")
REQUESTS, ROUNDS = 6, 2


def run(model: str, *arguments: str) -> Any:
    fixed = [
        "bench", "--model", model, "--load-format", "dummy", "--device", "cpu", "--num-prompts", str(REQUESTS),
        "--num-warmups", "2", "--rounds", str(ROUNDS), "--baseline", "monolithic", "--quiet",
    ]  # fmt: skip
    budgets = [] if "--token-budgets" in arguments else ["--token-budgets", "300"]
    return CliRunner().invoke(app, [*fixed, *budgets, *arguments])


def small_images(side: int) -> list[str]:
    """Random images of `side` x `side`."""
    return ["--dataset-name", "random-mm", "--random-mm-bucket-config", f'{{"({side},{side},1)": 1.0}}']


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module", params=MODELS)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, str]:
    """A model, the folder of its run on documents, and what was printed."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    result = run(request.param, "--dataset-path", "documents", "--output-dir", str(folder))
    assert result.exit_code == 0, result.output
    return request.param, folder, result.stdout


@pytest.mark.slow
def test_one_run_measures_eager_two_paths_and_the_monolithic_graph(finished: tuple[str, Path, str]) -> None:
    _, folder, _ = finished
    result = read_bench(folder).result
    means: dict[str, float] = {}
    for mode in ("eager", "graph", "monolithic"):
        entry = result.latency[mode]
        assert entry.calls == REQUESTS
        assert entry.mean_ms and entry.p50_ms and entry.p99_ms and 0 < entry.p50_ms <= entry.p99_ms
        means[mode] = entry.mean_ms
    for base, series in (("eager", "monolithic"), ("monolithic", "graph")):
        pair = result.comparison.pair(base, series)
        assert pair is not None and pair.p50 is not None and pair.p99 is not None
        assert pair.mean.verdict == "invalid"
        assert pair.mean.improvement_pct == pytest.approx(100 * (1 - means[series] / means[base]))
    correctness = result.correctness
    assert correctness is not None and correctness.status == "ok"
    assert 0 <= (correctness.monolithic_max_rel_l2 or 0.0) <= correctness.tolerance


@pytest.mark.slow
def test_the_modes_are_interleaved_and_change_places(finished: tuple[str, Path, str]) -> None:
    _, folder, _ = finished
    calls = read_samples(folder / "samples.csv").calls.groupby(["round", "call"])
    assert len(calls) == REQUESTS * ROUNDS
    orders = []
    for _, samples in calls:
        order = [series for series in samples["series"] if series != "eager_repeat"]
        assert sorted(order) == ["eager", "graph", "monolithic"]
        orders.append(order)
        assert samples["tokens"].nunique() == 1
        assert ((samples["replays"] > 0) == samples["series"].isin(["graph", "monolithic"])).all()
    before = [order.index("graph") < order.index("monolithic") for order in orders]
    assert 0 < sum(before) < len(before)
    assert {order[0] for order in orders} == {"eager", "graph", "monolithic"}


@pytest.mark.slow
def test_waste_counts_the_crops_that_images_do_not_have(finished: tuple[str, Path, str]) -> None:
    model, folder, _ = finished
    record = read_bench(folder)
    tokens = resolve_model(model).rule().path_tokens  # type: ignore[attr-defined]
    whole, planned = record.result.monolithic, record.resolved and record.resolved.monolithic
    assert whole is not None and planned is not None
    crops = planned.max_crops
    assert planned.item_tokens == tokens["global"] + crops * tokens["local"]
    assert all(budget % planned.item_tokens == 0 for budget in planned.token_budgets["default"])
    used = {row.path: row.tokens_replayed for row in record.result.graph.per_path}
    assert (whole.items, whole.hits, whole.replays) == (REQUESTS, REQUESTS, REQUESTS)
    assert whole.tokens_replayed == record.result.graph.tokens_replayed == sum(used.values())
    assert whole.budget_tokens_replayed == REQUESTS * planned.item_tokens
    assert whole.waste == pytest.approx(1 - sum(used.values()) / whole.budget_tokens_replayed)
    computed = {"global": REQUESTS * tokens["global"], "local": REQUESTS * crops * tokens["local"]}
    assert {row.path: (row.tokens_replayed, row.budget_tokens_replayed) for row in whole.parts} == {
        path: (used[path], computed[path]) for path in used
    }
    assert whole.captured and (whole.buffer_bytes or 0) > 0


@pytest.mark.slow
def test_the_record_follows_the_schema(finished: tuple[str, Path, str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "docs" / "records.schema.json").read_text("utf-8"))
    record = json.loads((finished[1] / "run.json").read_text("utf-8"))
    assert [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(record)] == []


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_tables_and_pages_show_both_sides(finished: tuple[str, Path, str], tmp_path: Path) -> None:
    _, folder, printed = finished
    result = read_bench(folder).result
    assert result.monolithic is not None and result.monolithic.waste is not None and result.graph.waste is not None
    waste = [f"{100 * share:.1f}%" for share in (result.graph.waste, result.monolithic.waste)]
    page = to_html(saved_document(folder))
    for text in (printed, page):
        assert "Two paths against one monolithic graph" in text
        assert "Encoder paths" in text
        assert "not a GPU" in text
        assert all(figure in text for figure in waste)
    assert "var(--monolithic)" in page
    summary = {(row["series"], row["metric"]): row for row in read_csv(folder / "summary.csv")}
    assert summary["monolithic", "mean"]["improvement_pct"] and summary["monolithic", "p50"]["verdict"] == "invalid"
    paths = {(row["series"], row["path"]): row for row in read_csv(folder / "per_path.csv")}
    assert set(paths) == {(mode, path) for mode in ("graph", "monolithic") for path in ("global", "local", "all")}
    assert float(paths["monolithic", "all"]["waste"]) == pytest.approx(result.monolithic.waste, abs=1e-5)
    assert [row["metric"] for row in read_csv(folder / "monolithic.csv")] == ["mean", "p50", "p99"]
    budgets = {row["path"] for row in read_csv(folder / "per_budget.csv")}
    assert budgets == {"global", "local", "monolithic"}
    plots = CliRunner().invoke(app, ["export", str(folder), "--formats", "plots", "--output-dir", str(tmp_path)])
    assert plots.exit_code == 0, plots.output
    for name in ("latency_by_tokens", "latency_distribution", "budgets", "paths"):
        assert "monolithic" in (tmp_path / "plots" / f"{name}.svg").read_text("utf-8")


@pytest.mark.slow
def test_its_table_is_exported_beside_those_of_other_runs(finished: tuple[str, Path, str], tmp_path: Path) -> None:
    _, folder, _ = finished
    runs = [str(folder), str(ROOT / "tests" / "data" / "bench-run")]
    result = CliRunner().invoke(app, ["export", *runs, "--formats", "csv,parquet", "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert [row["run"] for row in read_csv(tmp_path / "monolithic.csv")] == ["run"] * 3
    assert (tmp_path / "monolithic.parquet").exists()
    assert "monolithic" in {row["table"] for row in read_csv(tmp_path / "columns.csv")}


@pytest.mark.slow
def test_images_without_crops_replay_no_crops_on_two_paths_only(tmp_path: Path) -> None:
    result = run(
        "deepseek-ocr-debug", *small_images(100), "--monolithic-crops", "6", "--output-dir", str(tmp_path / "run"),
        "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    graph, whole = (json.loads(result.stdout)["result"][name] for name in ("graph", "monolithic"))
    assert [(row["path"], row["waste"]) for row in graph["per_path"]] == [("global", 0.0)]
    assert {row["path"]: row["waste"] for row in whole["parts"]} == {"global": 0.0, "local": 1.0}
    assert whole["waste"] == pytest.approx(24 / 44)
    assert whole["hits"] == REQUESTS


@pytest.mark.slow
def test_without_a_number_of_crops_the_graph_holds_the_most_of_the_workload(tmp_path: Path) -> None:
    run("deepseek-ocr-debug", *small_images(100), "--output-dir", str(tmp_path / "run"), "--json")
    resolved = read_bench(tmp_path / "run").resolved
    assert resolved is not None and resolved.monolithic is not None and resolved.monolithic.max_crops == 1


@pytest.mark.slow
def test_images_with_more_crops_than_the_graph_run_eagerly_and_are_counted(tmp_path: Path) -> None:
    result = run(
        "deepseek-ocr-debug", "--dataset-path", "documents", "--monolithic-crops", "4", "--output-dir",
        str(tmp_path / "run"), "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "6 crops" in result.stderr
    record = json.loads(result.stdout)["result"]
    whole = record["monolithic"]
    assert record["graph"]["misses"] == 0
    assert whole["misses"] > 0 and set(whole["misses_by_reason"]) == {"axis_not_captured"}
    assert whole["hits"] + whole["misses"] == REQUESTS
    assert record["correctness"]["status"] == "ok"


def test_a_dry_run_shows_what_to_expect_of_both(tmp_path: Path) -> None:
    arguments = ["--dataset-path", "documents", "--output-dir", str(tmp_path / "run"), "--dry-run"]
    result = run("step3-vl-debug", *arguments)
    assert result.exit_code == 0, result.output
    assert "Monolithic graphs:" in result.stdout and "Encoder paths" in result.stdout
    expected = json.loads(run("step3-vl-debug", *arguments, "--json").stdout)["expected"]
    assert expected["monolithic"]["waste"] > expected["waste"] > 0
    assert not (tmp_path / "run").exists()


def test_wrong_monolithic_outputs_are_never_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MonolithicEncoder.forward_packed

    def doubled(self: MonolithicEncoder, *arguments: Any) -> list[torch.Tensor]:
        return [2 * rows for rows in real(self, *arguments)]

    monkeypatch.setattr(MonolithicEncoder, "forward_packed", doubled)
    result = run("deepseek-ocr-debug", *small_images(100), "--output-dir", str(tmp_path / "run"))
    assert result.exit_code == 4
    assert "monolithic and eager differ" in result.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))["result"]
    assert (record["correctness"]["status"], record["latency"]) == ("incorrect", {})
    assert record["correctness"]["max_rel_l2"] <= record["correctness"]["tolerance"]
    assert record["correctness"]["monolithic_max_rel_l2"] > 0.5


@pytest.mark.slow
def test_replays_timed_alone_go_to_their_side_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays are timed on a GPU only; here each graph of budget b is said to take b milliseconds."""

    def timed(self: Diagnosis, *_: Any) -> Iterator[tuple[GraphKey, dict[str, Any]]]:
        timings = {"gpu_busy_ms": None, "kernels": None, "launch_gap": 1.0}
        for key in self.manager.graphs:
            yield key, {"replay_ms": float(key.token_budget), **timings}

    def captured(self: BenchRun, *_: Any) -> None:
        # From here on only the record asks for the device.
        self.device = torch.device("cuda", 0)

    monkeypatch.setattr(BenchRun, "_save_before_measuring", captured)
    monkeypatch.setattr(BenchRun, "_speed_of_light", lambda self: None)
    monkeypatch.setattr(BenchRun, "release", lambda self: None)
    monkeypatch.setattr(Diagnosis, "replays", timed)
    monkeypatch.setattr(Diagnosis, "call_overheads", lambda *_: iter(()))
    result = run("deepseek-ocr-debug", *small_images(200), "--output-dir", str(tmp_path / "run"), "--json")
    assert result.exit_code == 0, result.output
    graph, whole = (json.loads(result.stdout)["result"][name] for name in ("graph", "monolithic"))
    two, one = ({row["path"]: row for row in side["per_path"]} for side in (graph, whole))
    for rows in (two, one):
        for row in rows.values():
            assert row["replay_ms"] == pytest.approx(row["budget_tokens_replayed"] / REQUESTS)
    assert graph["launch_gap"] == whole["launch_gap"] == 1.0
    assert whole["host_steps_ms"]["replay"] > 0


@pytest.mark.parametrize(
    ("model", "arguments", "named"),
    [
        ("qwen3-vl-debug", [], "qwen3-vl-debug has one path; use a model with a global and a local path (DeepSeek-OCR"),
        ("internvl-debug", [], "internvl-debug has one path"),
        ("deepseek-ocr-debug", ["--monolithic-crops", "0"], "--monolithic-crops is 0; it must be"),
        ("deepseek-ocr-debug", ["--baseline", "eager", "--monolithic-crops", "3"], "add --baseline monolithic"),
        ("deepseek-ocr-debug", ["--token-budgets", "40"], "every image takes 44 rows of a monolithic graph (20 of"),
        ("deepseek-ocr-debug", ["--packing", "optimal"], "use another packing with --baseline monolithic"),
        (
            "deepseek-ocr-debug",
            ["--tensor-parallel-size", "2", "--mm-encoder-tp-mode", "data"],
            "--tensor-parallel-size is 2; leave one of the two out",
        ),
        ("deepseek-ocr-debug", ["--baseline", "both"], "known: eager, itemwise, hf, monolithic"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    model: str, arguments: list[str], named: str, tmp_path: Path
) -> None:
    result = run(model, "--dataset-path", "documents", "--output-dir", str(tmp_path / "run"), *arguments)
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert not (tmp_path / "run").exists()
