"""The records that the repository keeps: each opens with its samples, and their page is made from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from make_page import PAGE, VERIFIED, judged_again, page, verified

from vitgraph.records.sample_table import read_samples
from vitgraph.records.sections import Section
from vitgraph.records.store import beside, iter_records, read_record

RESULTS = Path(__file__).parents[3] / "results"
JUDGED = [file for kind in ("bench", "compare", "compile-rows") for file in iter_records(RESULTS / kind)]
LARGEST_BYTES = 8 * 2**20


def verdicts(node: Any, place: str = "result") -> Iterator[tuple[str, str]]:
    """Every verdict and recommendation below a section, with where it stands."""
    if isinstance(node, Section):
        node = dict(node)
    if not isinstance(node, dict | tuple):
        return
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if key in ("verdict", "sure", "mode"):
            yield f"{place}.{key}", str(value)
        yield from verdicts(value, f"{place}.{key}")


@pytest.mark.slow
@pytest.mark.parametrize("file", iter_records(RESULTS), ids=lambda file: str(file.parent.relative_to(RESULTS)))
def test_a_kept_record_opens_with_its_samples(file: Path) -> None:
    record = read_record(file)
    assert record.status != "error"
    assert record.command[0] == "vitgraph"
    if record.samples_file is not None:
        samples = read_samples(beside(file, record.samples_file))
        assert samples.warning is None and len(samples)


@pytest.mark.slow
@pytest.mark.parametrize("file", JUDGED, ids=lambda file: str(file.parent.relative_to(RESULTS)))
def test_a_kept_record_says_what_the_rule_of_today_says(file: Path) -> None:
    record = read_record(file)
    found = judged_again(record, read_samples(beside(file, str(record.samples_file))))
    assert dict(verdicts(found)) == dict(verdicts(record.result)), "run python results/make_page.py"


def test_the_page_is_that_of_the_records() -> None:
    assert (RESULTS / PAGE).read_text(encoding="utf-8") == page(RESULTS), "run python results/make_page.py"


def test_what_is_called_verified_is_in_a_committed_record() -> None:
    assert json.loads(VERIFIED.read_text(encoding="utf-8")) == {"rows": verified(RESULTS)}


def test_the_shelf_is_small() -> None:
    assert sum(file.stat().st_size for file in RESULTS.rglob("*") if file.is_file()) < LARGEST_BYTES
