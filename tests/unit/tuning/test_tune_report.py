"""Tables, CSV and plots of a tuning result, from its JSON form alone."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from made_up_document import terminal_text
from synthetic import Machine, image, plan_of, synthetic_profile, video
from typer.testing import CliRunner

from vitgraph.cli import app
from vitgraph.measure.calls import EncoderCall
from vitgraph.measure.setup import resolve_source
from vitgraph.models.geometry import GridGeometry
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.targets import TARGETS, VITGRAPH, TargetCost
from vitgraph.records.record import TuneRecord
from vitgraph.records.sections import Resolved, Workload
from vitgraph.report.document import Document
from vitgraph.report.documents import document_of, write
from vitgraph.report.views.plan import explanation_document
from vitgraph.specs.parts import ModelSpec
from vitgraph.tuning.advice import tune_budgets
from vitgraph.tuning.explain import explain_plan, explain_workload

COUNTED = ("requests", "calls", "items", "images")
COST = TargetCost(CostModel(synthetic_profile()), TARGETS[VITGRAPH])


@cache
def tuned(machine: Machine | None = None) -> TuneRecord:
    sizes = (64, 880, 6400)
    calls = [
        EncoderCall(
            number, (number,), (), (GridGeometry("image", 1, 2, 2 * sizes[number % 3]),), (image(sizes[number % 3]),)
        )
        for number in range(12)
    ]
    source = resolve_source(ModelSpec("qwen3-vl-30b-a3b"))
    advice = tune_budgets(calls, source, synthetic_profile(machine), max_call_tokens=16384)
    return TuneRecord(
        status="complete",
        status_reason=None,
        command=("vitgraph", "tune-budgets"),
        resolved=Resolved(model=source.name),
        workload=Workload(name="three sizes", fingerprint="f" * 16, videos=0, **dict.fromkeys(COUNTED, 12)),
        result=advice.result,
    )


def changed(record: TuneRecord, **fields: Any) -> TuneRecord:
    return record.model_copy(update={"result": record.result.model_copy(update=fields)})


def text_of(document: Document) -> str:
    return " ".join(terminal_text(document, 300).split())


def test_tables_answer_the_question() -> None:
    data = tuned()
    text = text_of(document_of(data))
    assert "vitgraph tune-budgets: qwen3-vl-30b-a3b, three sizes, for vitgraph, objective mean" in text
    assert "Use graphs: predicted" in text
    assert "Budgets 2: 64, 880" in text
    assert "Misses: 4 items (33.3%), 6400 to 6400 tokens: more tokens than the largest budget" in text
    assert "model error on 24 calls it has not seen: median 0.0%" in text
    assert "note: the profile is synthetic: nothing in it was measured" in text
    assert f"--compilation-config '{data.result.compilation_config}'" in text
    assert "vllm serve Qwen/Qwen3-VL-30B-A3B-Instruct" in text


def test_tables_say_so_where_graphs_lose() -> None:
    text = text_of(document_of(tuned(Machine(launch=0.01, call=0.5)))).lower()
    assert "leave graphs off" in text
    assert "nothing to paste" in text


def test_plan_of_a_call_names_replays_and_reasons() -> None:
    explained = explain_plan([image(100), video(4, 20)], plan_of([128], 2), "greedy", COST)
    text = text_of(explanation_document(explained))
    assert "128 (1 slot)" in text
    assert "videos are left to eager" in text
    assert "greedy: 1 hit, 1 miss, 1 replay, waste 21.9%" in text


def test_plan_without_a_calibration_has_no_times() -> None:
    text = text_of(explanation_document(explain_workload([[image(100)], [image(300)]], plan_of([128]), "greedy")))
    assert "No predicted times: no calibration was given" in text
    assert "Misses: 1 item" in text


def test_files_have_a_row_for_every_strategy_and_budget(tmp_path: Path) -> None:
    data = tuned()
    written = {path.name: path for path in write(document_of(data), tmp_path, ("csv", "plots"))}
    rows = list(csv.DictReader(written["settings.csv"].open()))
    assert [row["name"] for row in rows][:5] == ["tuned", "automatic", "seed_nine", "eager", "oracle"]
    assert rows[0]["token_budgets"] == "64 880"
    assert float(rows[3]["mean_ms"]) == pytest.approx(data.result.baselines.eager.mean_ms, rel=1e-8)
    assert rows[3]["graphs"] == ""
    assert [row["token_budget"] for row in csv.DictReader(written["budgets.csv"].open())] == ["64", "880"]
    assert {"pareto.png", "pareto.svg", "tuned_budgets.png", "tuned_budgets.svg"} <= set(written)


def test_eager_is_drawn_with_its_doubt() -> None:
    data = tuned()
    error = data.result.error
    doubted = error.model_copy(update={"eager": error.eager.model_copy(update={"median_pct": 10.0})})
    upper, lower = document_of(changed(data, error=doubted)).charts[0].draw().axes
    for axes in (upper, lower):
        labels = [str(patch.get_label()) for patch in axes.patches]
        assert "eager ± its error" in labels


def test_no_budgets_figure_where_nothing_is_replayed() -> None:
    assert [chart.name for chart in document_of(changed(tuned(), by_budget=())).charts] == ["pareto"]


@pytest.mark.slow
def test_a_saved_result_is_rebuilt_from_its_record_alone(tmp_path: Path) -> None:
    data = tuned()
    (tmp_path / "run.json").write_text(data.model_dump_json(), encoding="utf-8")
    result = CliRunner().invoke(app, ["export", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("vitgraph tune-budgets: qwen3-vl-30b-a3b")
    live = {path.name: path for path in write(document_of(data), tmp_path / "live", ("csv",))}
    for name in ("settings.csv", "budgets.csv"):
        assert (tmp_path / "export" / name).read_bytes() == live[name].read_bytes()
