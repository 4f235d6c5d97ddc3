"""`vllms_manager.py`: vLLM's manager around a tower here, and the tables that it makes of its records."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from shutil import copy
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllms_files import VllmsManagers
from vllms_manager import AGAIN, FEWEST_CALLS, WARM_UPS, Scenario, keywords, main, measure

from vitgraph.library import encode_eagerly, make_inputs
from vitgraph.measure.calls import make_calls
from vitgraph.models.families.qwen3_vl import Qwen3VLEncoder
from vitgraph.models.grid_encoder import GridTowerEncoder
from vitgraph.records.sample_table import EAGER
from vitgraph.tuning.objective import AUTOMATIC, SEED_NINE, TUNED
from vitgraph.workloads.base import MediaItem, number_requests

CALLS = 20


def run_of(**changes: Any) -> dict[str, Any]:
    """A run: the tuned list takes half of eager's time, the nine as long, the automatic list a tenth more."""
    factors = {EAGER: 1.0, AGAIN: 1.05, AUTOMATIC: 1.1, SEED_NINE: 1.0, TUNED: 0.5}
    return {
        "scenario": "2 a call",
        "compiled": False,
        "doubt": None,
        "verdict": "use_graphs",
        "calls": list(range(CALLS)),
        "requests": [2] * CALLS,
        "replays": [1] * (CALLS - 1) + [0],
        "times_ms": {name: [factor * (60.0 + 4.0 * call) for call in range(CALLS)] for name, factor in factors.items()},
        "predicted_ms": {
            EAGER: [0.9 * (60.0 + 4.0 * call) for call in range(CALLS)],
            TUNED: [0.55 * (60.0 + 4.0 * call) for call in range(CALLS)],
        },
        **changes,
    }


def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *runs: Any) -> list[str]:
    file = tmp_path / "record.json"
    file.write_text(json.dumps({"runs": runs}), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["vllms_manager.py", "--show", str(file)])
    main()
    return [line for line in capsys.readouterr().out.splitlines() if line]


def test_the_tables_are_of_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    off = run_of(compiled=True, verdict="no_graphs", scenario="5 requests/s", doubt="a profile of another tower")
    lines = shown(tmp_path, capsys, monkeypatch, run_of(), off)
    assert lines[2] == (
        "| not compiled | 2 a call | on | 20 | 49.0 | -10.0 (-10.0 … -10.0) | +0.0 (+0.0 … +0.0) | "
        "+50.0 (+50.0 … +50.0) | 100.0 / 0.0 / 0.0 | -10.0 / +0.0 / +50.0 |"
    )
    assert lines[3].startswith("| compiled | 5 requests/s | off | 20 |")
    # Eager is predicted a tenth too short, graphs a tenth too long.
    assert lines[6] == "| not compiled | 2 a call | +50.0 | +38.9 | 10.0 | 10.0 | -5.0 | 100.0 |"
    assert len(lines) == 7, "what another tower's profile predicts is no prediction"


def test_a_call_counts_as_often_as_it_has_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run_of(requests=[1] * (CALLS - 1) + [6])
    for series in alone["times_ms"].values():
        series[:] = [10.0] * (CALLS - 1) + [60.0]
    alone["times_ms"][TUNED][-1] = 120.0
    row = shown(tmp_path, capsys, monkeypatch, alone)[2]
    # Ten milliseconds a request everywhere; six of 25 requests take twice as long.
    assert "| 10.0 |" in row and "| -24.0 (" in row and "/ 24.0 |" in row


def test_a_scenario_that_was_not_reached_has_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(shown(tmp_path, capsys, monkeypatch, run_of(calls=[]))) == 4


# -- measuring ---------------------------------------------------------------------------------------------------------


class FakeModel:
    """Encodes nothing; the user stops the run at one of the calls."""

    def __init__(self, stop_at: int) -> None:
        self.left = stop_at

    def encoder_eager_forward(self, inputs: Any) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return torch.ones(1, 1)


def measured(tower: GridTowerEncoder, stop_at: int) -> tuple[dict[str, Any], bool]:
    """What a run on 100 calls of one image saves whose time is up at once, and whether it was stopped."""
    requests = number_requests([(MediaItem(64, 64),)] * 100)
    calls, _ = make_calls(requests, tower.rule, 1)
    lists = dict.fromkeys((AUTOMATIC, SEED_NINE, TUNED), ((64,), 1))
    predicted = {name: [1.0] * len(calls) for name in (EAGER, *lists)}
    scenario = Scenario({"scenario": "1 a call"}, lists, calls, predicted, [1] * len(calls))
    manager = SimpleNamespace(execute=lambda _: [torch.ones(1, 1)])
    managers: Any = SimpleNamespace(
        model=FakeModel(stop_at), encoder=tower, captured=lambda *_: (manager, {"capture_s": 0.0})
    )
    saved: list[dict[str, Any]] = []
    is_stopped = measure(scenario, managers, time.perf_counter(), saved.append)
    return saved[-1], is_stopped


def test_some_calls_are_measured_however_late_it_is(tower: GridTowerEncoder) -> None:
    run, is_stopped = measured(tower, stop_at=-1)
    assert not is_stopped
    assert run["calls"] == list(range(WARM_UPS, WARM_UPS + FEWEST_CALLS))
    columns = [run[name] for name in ("requests", "tokens", "images", "replays")]
    columns += [*run["times_ms"].values(), *run["predicted_ms"].values()]
    assert {len(column) for column in columns} == {FEWEST_CALLS}
    assert list(run["times_ms"]) == [EAGER, AGAIN, AUTOMATIC, SEED_NINE, TUNED]
    assert run["max_rel_l2"] == 0.0


def test_a_stopped_run_keeps_the_calls_that_were_measured_whole(tower: GridTowerEncoder) -> None:
    # Each warm-up is eager twice; each call three times, of which the first is not timed.
    run, is_stopped = measured(tower, stop_at=2 * WARM_UPS + 3 * 5 + 3)
    assert is_stopped
    assert len(run["calls"]) == len(run["times_ms"][TUNED]) == 5


@pytest.mark.slow
def test_vllms_manager_gives_what_the_tower_gives(tower: GridTowerEncoder, vllm_source: Path, tmp_path: Path) -> None:
    for file in (
        *("v1/worker/encoder_cudagraph.py", "v1/worker/encoder_cudagraph_defs.py"),
        "model_executor/models/qwen3_vl.py",
    ):
        copy(vllm_source / "vllm" / file, tmp_path)
    assert isinstance(tower, Qwen3VLEncoder)
    inputs = make_inputs(tower, [(336, 336), (500, 300), (224, 224), (900, 700)])
    with patch.dict(sys.modules), torch.inference_mode():
        managers = VllmsManagers(tmp_path, tower)
        manager, facts = managers.captured((64, 300), 2)
        found = manager.execute(keywords(tower, inputs))
    assert facts["budgets"] == 2 and facts["items"] == 2
    for one, other in zip(found, encode_eagerly(tower, inputs), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    # The largest image is in no budget.
    assert (manager.graph_hits, manager.graph_misses) == (3, 1)
