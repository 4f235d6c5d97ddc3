"""vLLM's own tests of its encoder-graph manager, run on this project's: all pass but the named differences.

The file is read from vLLM's source distribution, which pip fetches; nothing of it is kept here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OWN_TESTS = "tests/v1/cudagraph/test_encoder_cudagraph.py"

WORDING, RUNNER, POOL = (
    "the same refusal in other words",
    "of vLLM's encoder-only runner and connector, which are not the manager's",
    "the manager makes its own pool and takes none",
)
DIFFERENCES = {
    "test_user_specified_bad_combo_raises": WORDING,
    "test_zero_min_budget_raises": WORDING,
    "test_negative_max_budget_raises": WORDING,
    "test_min_greater_than_max_raises": WORDING,
    "test_user_budgets_zero_raises": WORDING,
    "test_user_budgets_negative_raises": WORDING,
    "test_eonly_capture_preserves_outputs_across_replay_and_fallback[False]": RUNNER,
    "test_eonly_capture_preserves_outputs_across_replay_and_fallback[True]": RUNNER,
    "test_eonly_without_encoder_graph_skips_capture": RUNNER,
    "test_capture_uses_supplied_graph_pool": POOL,
}
"""Tests that do not pass, and why; docs/in-vllms-manager.md says it too."""


@pytest.fixture(scope="module")
def own_tests(vllm_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's test file, its one device that is named made the platform's."""
    found = vllm_source / OWN_TESTS
    text = found.read_text(encoding="utf-8")
    copy = tmp_path_factory.mktemp("own") / found.name
    copy.write_text(text.replace('torch.device("cuda:0")', "torch.device(current_platform.device_type, 0)"))
    return copy


@pytest.mark.slow
def test_vllms_own_tests_pass_but_for_the_named_differences(own_tests: Path) -> None:
    report = own_tests.with_suffix(".xml")
    places = ("-c", os.devnull, f"--rootdir={own_tests.parent}", f"--junitxml={report}", str(own_tests))
    options = ("-q", "-n0", "-p", "tests.vllm_stand_in", "--noconftest", "-p", "no:cacheprovider", *places)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *options,
            "-n0",
            f"--rootdir={own_tests.parent}",
            f"--junitxml={report}",
            own_tests,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=own_tests.parent,
        capture_output=True,
        check=False,
    )
    cases = {case.attrib["name"]: case for case in ElementTree.parse(report).iter("testcase")}
    assert len(cases) > 40
    faults = {
        name: case for name, case in cases.items() if case.find("failure") is not None or case.find("error") is not None
    }
    assert faults.keys() == DIFFERENCES.keys()
    assert not [name for name, case in cases.items() if case.find("skipped") is not None]
    for name, case in faults.items():
        text = "".join(case.itertext())
        assert ("Regex pattern did not match" in text) == (DIFFERENCES[name] == WORDING), name


def test_the_page_names_every_difference() -> None:
    page = (ROOT / "docs/in-vllms-manager.md").read_text(encoding="utf-8")
    assert [name for name in DIFFERENCES if f"`{name.partition('[')[0]}`" not in page] == []
