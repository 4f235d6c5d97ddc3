"""The reference page and the schema are those of the types, and say something of every field."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import make_reference as reference
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tests" / "data" / "bench-run"


def test_the_files_are_up_to_date() -> None:
    made = {name: text() for name, text in reference.PAGES.items()}
    stale = [name for name, text in made.items() if (ROOT / "docs" / name).read_text(encoding="utf-8") != text]
    assert not stale, "run python docs/make_reference.py"


def test_every_field_has_a_meaning_and_every_link_a_place() -> None:
    text = reference.records_page()
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", text, re.MULTILINE)
    assert len(rows) > 250
    assert not [name for name, meaning in rows if not meaning.endswith(".")]
    places = {line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")}
    assert not set(re.findall(r"\]\(#(\w+)\)", text)) - places


def test_the_schema_takes_a_record_and_refuses_a_field_that_is_unknown() -> None:
    record = json.loads((EXAMPLE / "run.json").read_text())
    schema = json.loads(reference.records_schema())
    jsonschema.validate(record, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(record | {"misspelt": 1}, schema)
