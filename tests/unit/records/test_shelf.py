"""The records that the repository keeps: each opens with its samples, and their page is made from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitgraph.records.sample_table import read_samples
from vitgraph.records.shelf import PAGE, page
from vitgraph.records.store import beside, iter_records, read_record

RESULTS = Path(__file__).parents[3] / "results"
LARGEST_BYTES = 8 * 2**20


@pytest.mark.parametrize("file", iter_records(RESULTS), ids=lambda file: str(file.parent.relative_to(RESULTS)))
def test_a_kept_record_opens_with_its_samples(file: Path) -> None:
    record = read_record(file)
    assert record.status != "error"
    assert record.command[0] == "vitgraph"
    if record.samples_file is not None:
        samples = read_samples(beside(file, record.samples_file))
        assert samples.warning is None and len(samples)


def test_the_page_is_that_of_the_records() -> None:
    assert (RESULTS / PAGE).read_text(encoding="utf-8") == page(RESULTS), "run python -m vitgraph.records.shelf results"


def test_the_shelf_is_small() -> None:
    assert sum(file.stat().st_size for file in RESULTS.rglob("*") if file.is_file()) < LARGEST_BYTES
