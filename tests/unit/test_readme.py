"""The README's figures are those of the records, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELF = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| \[[^]]+\]\(results/([^)]+)\) \| (.+) \|$", README, re.MULTILINE)


@pytest.mark.parametrize(("folder", "cells"), ROWS, ids=[folder for folder, _ in ROWS])
def test_a_result_is_what_the_record_says(folder: str, cells: str) -> None:
    (line,) = (line for line in SHELF.splitlines() if line.startswith(f"| [{folder}]("))
    of_record = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells.split(" | ") == [of_record[4], of_record[5], of_record[7], of_record[8]]


def test_there_are_results_and_every_link_leads_somewhere() -> None:
    assert len(ROWS) > 5
    links = re.findall(r"\]\(([^)#]+)", README)
    assert not [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]


def test_the_first_screen_stays_short() -> None:
    assert len(README.splitlines()) <= 135
