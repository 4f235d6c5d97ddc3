"""Which requests a call has, as a user says it: mixes, arrivals, and the calls written as a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vitgraph.cli import app

MODEL = ("--model", "qwen3-vl-30b-a3b")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def plan(*arguments: str) -> dict[str, Any]:
    result = run("plan", *MODEL, "--token-budgets", "512,4096", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_mix_of_requests_makes_calls_of_several_sizes() -> None:
    even, mixed = (plan("--num-prompts", "60", "--requests-per-call", given) for given in ("2", "1:0.5,4:0.5"))
    assert even["calls"] == 30
    assert 15 < mixed["calls"] < 60
    assert even["counts"]["items"] == mixed["counts"]["items"]


@pytest.mark.slow
def test_arrivals_make_calls_that_are_written_and_run_again(tmp_path: Path) -> None:
    file = tmp_path / "calls.csv"
    arguments = ("--num-prompts", "60", "--request-rate", "40")
    made = run("workload", "calls", *MODEL, *arguments, "--output", str(file), "--json")
    assert made.exit_code == 0, made.output
    facts = json.loads(made.stdout)
    assert facts["requests"] >= 60 > facts["calls"]
    assert "assumed, not measured" in facts["provenance"]["engine"]
    assert (tmp_path / "calls-calls.png").stat().st_size > 0
    again, direct = plan("--dataset-path", str(file)), plan(*arguments)
    assert again["calls"] == direct["calls"] == facts["calls"]
    assert again["counts"] == direct["counts"]
    shown = run("workload", "calls", *MODEL, *arguments, "--output", str(file), "--overwrite")
    assert "requests a call in the mean" in " ".join(shown.output.split())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--requests-per-call", "1:0.5,2"], "--requests-per-call is '1:0.5,2'"),
        (["--requests-per-call", "2", "--request-rate", "3"], "give one"),
        (["--request-rate", "often"], "--request-rate"),
        (["--request-rate", "trace"], "arrival_s"),
    ],
)
def test_what_makes_no_calls_is_refused(arguments: list[str], named: str) -> None:
    result = run("plan", *MODEL, "--num-prompts", "10", *arguments)
    assert result.exit_code == 2, result.output
    assert named in result.stderr


def test_arrivals_need_times_of_the_encoder() -> None:
    result = run("plan", "--model", "qwen2-vl-7b", "--num-prompts", "10", "--request-rate", "5")
    assert result.exit_code == 2
    assert "vitgraph calibrate --model qwen2-vl-7b" in result.stderr
