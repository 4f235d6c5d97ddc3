"""A damaged record is refused in one line that names the file and the field; no damage ends in a traceback."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vitgraph.errors import UsageError
from vitgraph.records.store import read_record
from vitgraph.report.documents import document_of

ROOT = Path(__file__).parents[3]
RECORDS = {
    "bench": ROOT / "tests" / "data" / "bench-run" / "run.json",
    "compare": ROOT / "results" / "compile-rows" / "gemma4" / "run.json",
    "tune": ROOT / "results" / "tune" / "qwen2.5-vl-7b_videos-x1" / "run.json",
    "profile": ROOT / "results" / "profile" / "internvl3.5-8b_336x336" / "run.json",
    "verify": ROOT / "results" / "verify" / "2gpu" / "run.json",
    "micro": ROOT / "results" / "micro" / "glm-4.1v-9b" / "run.json",
}
WRONG: tuple[Any, ...] = (None, "text", -1, 1.5, [], {}, True, float("nan"), 10**30, [[[]]])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field of a record, but those of free form."""
    entries = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for name, entry in entries:
        yield (*path, name)
        yield from places(entry, (*path, name))


@pytest.mark.parametrize("name", RECORDS)
def test_no_single_mutation_ends_in_a_traceback(name: str, tmp_path: Path) -> None:
    text = RECORDS[name].read_text(encoding="utf-8")
    draw = random.Random(0)
    found = list(places(json.loads(text)))
    refused = 0
    for path in draw.sample(found, min(60, len(found))):
        record = json.loads(text)
        place = record
        for step in path[:-1]:
            place = place[step]
        wrong = draw.choice([*WRONG, "missing"])
        if wrong == "missing" and isinstance(place, dict):
            del place[path[-1]]
        else:
            place[path[-1]] = wrong
        (tmp_path / "run.json").write_text(json.dumps(record), encoding="utf-8")
        try:
            document_of(read_record(tmp_path))
        except UsageError as error:
            refused += 1
            assert "\n" not in str(error) and "run.json" in str(error)
    assert refused > 20


@pytest.mark.parametrize(
    "text",
    ["", "[" * 5000, "null", "[]", '"text"', '{"kind": "bench"}', '{"kind": 5, "format": 2}', "\x00", "9" * 5000],
)
def test_what_is_no_record_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"run\.json") as raised:
        read_record(tmp_path)
    assert "\n" not in str(raised.value)


def test_the_field_is_named(tmp_path: Path) -> None:
    record = json.loads(RECORDS["bench"].read_text(encoding="utf-8"))
    record["result"]["latency"]["graph"]["mean_ms"] = "5.2"
    (tmp_path / "run.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(UsageError, match=r"run\.json: result\.latency\.graph\.mean_ms: Input should be a valid number"):
        read_record(tmp_path)
