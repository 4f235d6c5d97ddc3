"""The verification table shows each model once, and every fault with its place, whatever was verified."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from vitgraph.report.verify_table import render_verify

FAULT = "relative L2 0.5 from eager, above 1e-05: item 0 [odd], budget 64"


def make_result(name: str, **changes: Any) -> dict[str, Any]:
    checks = [
        {
            "name": "predicted_tokens",
            "status": "ok",
            "max_rel_l2": None,
            "compared": 0,
            "failures": 0,
            "detail": "9 sizes",
        },
        {
            "name": "every_graph",
            "status": "ok",
            "max_rel_l2": 2e-7,
            "compared": 12,
            "failures": 0,
            "detail": "6 graphs",
        },
    ]
    return {
        "architecture": "SomeArchitecture",
        "row": "some_row",
        "preset": name,
        "device": "cpu",
        "dtype": "float32",
        "backend_requested": "auto",
        "backend_used": "TORCH_SDPA",
        "status": "ok",
        "max_rel_l2": 2e-7,
        "tolerance": 1e-5,
        "checks": checks,
        "graphs_captured": 6,
        "graphs_dropped": 0,
        "calls": 200,
        "items": 431,
        "seconds": 3.25,
        "error": None,
    } | changes


def render(results: list[dict[str, Any]], width: int = 110, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    render_verify(results, console, **options)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_several_models_get_a_line_each_and_only_faults_get_details():
    checks = make_result("x")["checks"]
    broken = [checks[0], checks[1] | {"status": "failed", "failures": 3, "detail": FAULT}]
    results = [
        make_result("model-a"),
        make_result("model-b", status="failed", max_rel_l2=0.5, checks=broken, graphs_dropped=2),
        make_result(
            "model-c",
            status="error",
            tolerance=None,
            max_rel_l2=None,
            checks=[],
            error="OutOfMemoryError: CUDA out of memory",
            backend_used=None,
            seconds=None,
        ),
    ]
    assert render(results) == (
        "Model     Status   Rel. L2   Graphs   Calls   Items   Seconds\n"
        "─────────────────────────────────────────────────────────────\n"
        "model-a   ok       2.0e-07        6     200     431       3.2\n"
        "model-b   failed   5.0e-01   6 (-2)     200     431       3.2\n"
        "model-c   error          –        6     200     431         –\n"
        "\n"
        "model-b\n"
        f"  every_graph  failed  {FAULT} (and 2 more)\n"
        "\n"
        "model-c\n"
        "  Not verified: OutOfMemoryError: CUDA out of memory\n"
        "\n"
        "1 of 3 encoders verified\n"
        "Relative L2 distance from eager of at most 1e-05; float32 on cpu, TORCH_SDPA (asked for auto)\n"
    )


def test_one_model_gets_every_check_listed():
    text = render([make_result("model-a")])
    assert "  predicted_tokens  ok  9 sizes\n  every_graph       ok  6 graphs\n" in text
    assert "\n1 of 1 encoder verified\n" in text


def test_listing_checks_can_be_asked_for_and_refused():
    assert "9 sizes" in render([make_result("a"), make_result("b")], show_checks=True)
    assert "9 sizes" not in render([make_result("a")], show_checks=False)


def test_a_distance_that_is_not_finite_is_shown_by_name():
    assert " nan " in render([make_result("a", status="failed", max_rel_l2="nan")], show_checks=False)
