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
VERSION = "0.33.0"
OWN_TESTS = "tests/v1/cudagraph/test_encoder_cudagraph.py"
SOURCE = "VITGRAPH_VLLM_SOURCE"
"""Environment variable with an unpacked source distribution, where pip need not fetch one."""

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
def own_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's test file, its one device that is named made the platform's."""
    folder = tmp_path_factory.mktemp("vllm")
    found = Path(os.environ[SOURCE]) / OWN_TESTS if SOURCE in os.environ else _fetched(folder)
    text = found.read_text(encoding="utf-8")
    copy = folder / found.name
    copy.write_text(text.replace('torch.device("cuda:0")', "torch.device(current_platform.device_type, 0)"))
    return copy


def _fetched(folder: Path) -> Path:
    """The file from the source distribution. pip unpacks it, and fails at its metadata, which would build vLLM."""
    options = ("--no-clean", "--no-deps", "--no-binary", "vllm", "--no-build-isolation", "--dest", str(folder))
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options, f"vllm=={VERSION}"]
    try:
        done = subprocess.run(
            command, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not fetch vLLM {VERSION}'s source within 300 s")
    found = next(folder.glob(f"pip-download-*/*/{OWN_TESTS}"), None)
    if found is None:
        pytest.skip(f"pip cannot fetch vLLM {VERSION}'s source: {(done.stderr.strip().splitlines() or ['?'])[0]}")
    return found


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
