"""The reference page and the schema are those of the types, and say something of every field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import jsonschema
import make_reference as reference
import pytest

from vitgraph.records.record import RECORDS

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tests" / "data" / "bench-run"
DOTTED = re.compile(r"`((?:environment|resolved|result|workload)\.[\w.]+)`")


def has_field(section: Any, path: str) -> bool:
    """Whether a type of a record has a field, at the end of a dotted path."""
    name, _, rest = path.partition(".")
    if name not in getattr(section, "model_fields", ()):
        return False
    annotation = section.model_fields[name].annotation
    return not rest or any(has_field(of, rest) for of in (annotation, *get_args(annotation)))


def test_every_field_that_a_page_names_is_one() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        named = DOTTED.findall(page.read_text(encoding="utf-8"))
        assert not [path for path in named if not any(has_field(of, path) for of in RECORDS.values())], page.name


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
