"""Tables, CSV and plots of a tuning result, from its JSON form alone."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from synthetic import Machine, image, plan_of, synthetic_profile, video
from typer.testing import CliRunner

from vitgraph.cli import app
from vitgraph.errors import UsageError
from vitgraph.measure.calls import EncoderCall
from vitgraph.measure.setup import resolve_source
from vitgraph.models.geometry import GridGeometry
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.targets import TARGETS, VITGRAPH, TargetCost
from vitgraph.records.bench_record import encode
from vitgraph.report.tune_plots import write_tune_plots
from vitgraph.report.tune_tables import render_explanation, render_tune, write_tune_csv
from vitgraph.specs import ModelSpec
from vitgraph.tuning.advice import tune_budgets
from vitgraph.tuning.explain import explain_plan, explain_workload

COST = TargetCost(CostModel(synthetic_profile()), TARGETS[VITGRAPH])


def tuned(machine: Machine | None = None) -> dict[str, Any]:
    sizes = (64, 880, 6400)
    calls = [
        EncoderCall(
            number, (number,), (), (GridGeometry("image", 1, 2, 2 * sizes[number % 3]),), (image(sizes[number % 3]),)
        )
        for number in range(12)
    ]
    result = tune_budgets(
        calls,
        resolve_source(ModelSpec("qwen3-vl-30b-a3b")),
        synthetic_profile(machine),
        max_call_tokens=16384,
        workload={"name": "three sizes"},
    )
    data: dict[str, Any] = json.loads(json.dumps(result.as_dict()))
    return data


def text_of(data: dict[str, Any], render: Any = render_tune) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    render(data, console)
    return console.export_text()


def test_tables_answer_the_question() -> None:
    data = tuned()
    text = text_of(data)
    assert "use graphs: predicted" in text
    assert "tune-budgets: qwen3-vl-30b-a3b, three sizes, for vitgraph, objective mean" in text
    assert "budgets                  2: 64, 880" in text
    assert "misses: 4 items (33.3%), 6400 to 6400 tokens: more tokens than the largest budget" in text
    assert "model error on 24 calls it has not seen: median 0.0%" in text
    assert "note: the profile is synthetic: nothing in it was measured" in text
    assert f"--compilation-config '{data['compilation_config']}'" in text.replace("\n", "")
    assert "vllm serve Qwen/Qwen3-VL-30B-A3B-Instruct" in text


def test_tables_say_so_where_graphs_lose() -> None:
    text = text_of(tuned(Machine(launch=0.01, call=0.5)))
    assert "leave graphs off" in text
    assert "For vLLM: no encoder graphs" in text


def test_measured_figures_stand_beside_the_predicted() -> None:
    data = tuned()
    row = {"n": 400, "mean_ms": 5.0, "p50_ms": 4.0, "p99_ms": 9.0}
    full = {
        **row,
        "mean_delta_pct": -50.0,
        "slower_share": 0.004,
        "graphs": 2,
        "memory_bytes": 2**20,
        "capture_s": 0.5,
        "predicted_mean_ms": 5.1,
        "prediction_error": {"n": 400, "median_pct": 2.5, "p90_pct": 6.0, "bias_pct": 1.0},
    }
    data["measured"] = {
        "calls": 400,
        "request_noise_pct": 3.0,
        "strategies": {"eager": row, "oracle": row, "tuned": full, "automatic": full},
        "closed": {"mean": 0.91, "median": None},
        "problems": ["the GPU was throttled (hw_slowdown)"],
    }
    text = text_of(data)
    assert "Measured on 400 calls, ms a request" in text
    assert "closed from the automatic list to the oracle: mean 91.0%, median –" in text
    assert "predicted mean 5.10 ms, measured 5.00 ms; median error of a call 2.5%, P90 6.0%" in text
    assert "+50.0%" in text
    assert "invalid: the GPU was throttled" in text


def test_plan_of_a_call_names_replays_and_reasons() -> None:
    text = text_of(explain_plan([image(100), video(4, 20)], plan_of([128], 2), "greedy", COST), render_explanation)
    assert "128 / 1" in text
    assert "videos are left to eager" in text
    assert "greedy: 1 hits, 1 misses, 1 replays, waste 21.9%" in text


def test_plan_without_a_calibration_has_no_times() -> None:
    text = text_of(explain_workload([[image(100)], [image(300)]], plan_of([128]), "greedy"), render_explanation)
    assert "no predicted times: no calibration was given" in text
    assert "misses: 1 item" in text


def test_csv_has_a_row_for_every_strategy_and_budget(tmp_path: Path) -> None:
    data = tuned()
    settings, budgets = write_tune_csv(data, tmp_path)
    rows = list(csv.DictReader(settings.open()))
    assert [row["name"] for row in rows][:5] == ["tuned", "automatic", "seed_nine", "eager", "oracle"]
    assert rows[0]["token_budgets"] == "64 880"
    assert float(rows[3]["mean_ms"]) == pytest.approx(data["baselines"]["eager"]["mean_ms"], rel=1e-8)
    assert rows[3]["graphs"] == ""
    assert [row["token_budget"] for row in csv.DictReader(budgets.open())] == ["64", "880"]


def test_files_are_not_replaced_unasked(tmp_path: Path) -> None:
    data = tuned()
    write_tune_csv(data, tmp_path)
    with pytest.raises(UsageError, match="exists"):
        write_tune_csv(data, tmp_path)
    write_tune_csv(data, tmp_path, overwrite=True)
    write_tune_plots(data, tmp_path)
    with pytest.raises(UsageError, match="exists"):
        write_tune_plots(data, tmp_path)


def test_plots_are_written_and_repeat_exactly(tmp_path: Path) -> None:
    data = tuned()
    files = write_tune_plots(data, tmp_path)
    assert [path.name for path in files] == ["pareto.png", "pareto.svg", "tuned_budgets.png", "tuned_budgets.svg"]
    first = [path.read_bytes() for path in files]
    assert [path.read_bytes() for path in write_tune_plots(data, tmp_path, overwrite=True)] == first


def test_no_budgets_figure_where_nothing_is_replayed(tmp_path: Path) -> None:
    data = tuned() | {"by_budget": []}
    assert [path.stem for path in write_tune_plots(data, tmp_path)] == ["pareto", "pareto"]


def test_a_saved_result_is_rebuilt_from_its_record_alone(tmp_path: Path) -> None:
    data = {**tuned(), "command": ["vitgraph", "tune-budgets"]}
    (tmp_path / "run.json").write_text(json.dumps(encode(data)), encoding="utf-8")
    result = CliRunner().invoke(app, ["export", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(text_of(data).splitlines()[0])
    folder = tmp_path / "export"
    write_tune_csv(data, tmp_path / "live")
    for name in ("settings.csv", "budgets.csv"):
        assert (folder / name).read_bytes() == (tmp_path / "live" / name).read_bytes()
    assert sorted(path.stem for path in (folder / "plots").iterdir()) == ["pareto"] * 2 + ["tuned_budgets"] * 2
