"""run.json against its JSON Schema, and the schema against its page in the documentation."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vitgraph.cli import app
from vitgraph.records.bench_record import SCHEMA_VERSION, TOP_LEVEL_FIELDS
from vitgraph.report.claims import LAUNCH_GAP_MEANING

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[3]
SCHEMA_FILE = ROOT / "vitgraph" / "schemas" / f"run-v{SCHEMA_VERSION}.schema.json"
EXAMPLE = ROOT / "tests" / "data" / "run-v1" / "run.json"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


SCHEMA = read(SCHEMA_FILE)
NOT_FINITE = ["nan", "inf", "-inf"]
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def problems(record: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(record)]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of a run that was just made on the CPU."""
    folder = tmp_path_factory.mktemp("fresh") / "run"
    arguments = [
        "bench", "--model", "qwen3-vl-debug", "--load-format", "dummy", "--device", "cpu", "--num-prompts", "4",
        "--num-warmups", "2", "--rounds", "1", "--mm-processor-kwargs", '{"max_pixels": 160000}',
        "--token-budgets", "64,128", "--output-dir", str(folder), "--quiet",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return read(folder / "run.json")


def bench_records() -> list[Path]:
    published = sorted((ROOT / "results").rglob("run.json")) if (ROOT / "results").exists() else []
    return [EXAMPLE, *(path for path in published if read(path).get("kind") == "bench")]


@pytest.mark.parametrize("path", bench_records(), ids=lambda path: path.parent.name)
def test_saved_records_follow_the_schema(path: Path) -> None:
    assert problems(read(path)) == []


def test_a_fresh_run_follows_the_schema(fresh: dict[str, Any]) -> None:
    assert problems(fresh) == []


def test_the_stored_example_has_the_shape_of_a_fresh_run(fresh: dict[str, Any]) -> None:
    """What is tested on the example holds for what the engine writes: nothing in it is of an older shape."""
    example = read(EXAMPLE)
    assert list(example["workload"]) == list(fresh["workload"])
    assert list(example["workload"]["tokens_per_request"]) == list(fresh["workload"]["tokens_per_request"])
    assert list(example["graph"]["per_budget"][0])[:9] == list(fresh["graph"]["per_budget"][0])
    for name, part in example["settings"].items():
        assert set(part) <= set(fresh["settings"][name]), name


def test_the_schema_is_valid_and_names_the_fields_that_records_are_saved_with() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert tuple(SCHEMA["properties"]) == TOP_LEVEL_FIELDS
    assert tuple(SCHEMA["required"]) == TOP_LEVEL_FIELDS
    assert SCHEMA["properties"]["schema_version"]["const"] == SCHEMA_VERSION


def drop_reason(record: dict[str, Any]) -> None:
    record["status"] = "interrupted"


def time_a_wrong_run(record: dict[str, Any]) -> None:
    record["correctness"]["status"] = "incorrect"


def set_field(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        for name in path[:-1]:
            record = record[name]
        record[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (drop_reason, "$.status_reason"),
        (time_a_wrong_run, "$.summary"),
        (set_field("schema_version", value=2), "$.schema_version"),
        (set_field("kind", value="tune"), "$.kind"),
        (set_field("summary", value={}), "$.summary"),
        (set_field("summary", "eager", "mean_ms", value="12"), "$.summary.eager.mean_ms"),
        (set_field("summary", "eager", "mean", value=1.0), "$.summary.eager"),
        (set_field("workload", "items", value=-1), "$.workload.items"),
        (set_field("correctness", "status", value="fine"), "$.correctness"),
        (set_field("command", value="vitgraph bench"), "$.command"),
        (set_field("graph", "hit_rate", value=98.5), "$.graph"),
        (set_field("comparison", "mean", "verdict", value="better"), "$.comparison"),
        (set_field("settings", "run", value={"rounds": 2}), "$.settings"),
        (set_field("workload", "provenance", value="made up"), "$.workload.provenance"),
        (set_field("environment", value={"device": "CPU"}), "$.environment"),
    ],
)
def test_what_breaks_the_format_is_refused(change: Callable[[dict[str, Any]], None], where: str) -> None:
    record = copy.deepcopy(read(EXAMPLE))
    change(record)
    assert [problem.split(":")[0] for problem in problems(record)].count(where) >= 1


def test_a_number_that_is_not_finite_is_a_word() -> None:
    record = read(EXAMPLE)
    record["correctness"] |= {"max_rel_l2": "nan", "status": "incorrect"}
    record |= {"status": "error", "status_reason": "outputs differ", "summary": {}, "comparison": {}}
    assert problems(record) == []


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    return SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def variants(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    schema = resolve(schema)
    for variant in schema.get("anyOf", [schema]):
        yield resolve(variant)


def enum_or_kinds(schema: dict[str, Any]) -> list[str]:
    if "enum" in schema:
        return [f"`{json.dumps(value)}`" for value in schema["enum"]]
    return [schema["type"]] if isinstance(schema["type"], str) else schema["type"]


def type_words(schema: dict[str, Any]) -> str:
    found: list[str] = []
    for variant in variants(schema):
        if "const" in variant:
            found.append(f"`{json.dumps(variant['const'])}`")
        elif variant.get("enum") != NOT_FINITE:
            found += enum_or_kinds(variant)
    return " or ".join(dict.fromkeys(found))


def fields(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Path, type, unit and meaning of every field that the schema describes, at any depth."""
    for variant in variants(schema):
        for name, entry in variant.get("properties", {}).items():
            path = f"{prefix}{name}"
            yield path, type_words(entry), entry.get("x-unit", ""), entry["description"]
            yield from fields(entry, f"{path}.")
            for part in variants(entry):
                if "properties" in resolve(part.get("items") or {}):
                    yield from fields(part["items"], f"{path}[].")


def row(field: tuple[str, str, str, str]) -> str:
    path, kind, unit, meaning = field
    return f"| `{path}` | {kind} | {unit} | {meaning} |"


def test_every_field_is_described_in_the_documentation() -> None:
    page = (ROOT / "docs" / "run-json.md").read_text(encoding="utf-8").splitlines()
    described = list(fields(SCHEMA))
    assert len(described) > 150
    missing = [row(field) for field in described if row(field) not in page]
    assert not missing, "docs/run-json.md lacks these rows:\n" + "\n".join(missing)
    stale = [line for line in page if line.startswith("| `") and line not in set(map(row, described))]
    assert not stale, "docs/run-json.md has rows that the schema does not:\n" + "\n".join(stale)


def test_the_record_explains_the_launch_gap_in_the_words_of_the_reports() -> None:
    words = LAUNCH_GAP_MEANING[0].upper() + LAUNCH_GAP_MEANING[1:]
    described = {path: meaning for path, _, _, meaning in fields(SCHEMA) if path.endswith("launch_gap")}
    assert len(described) == 4
    assert all(meaning.startswith(words) for meaning in described.values())


def test_a_fresh_run_has_no_undescribed_field(fresh: dict[str, Any]) -> None:
    known = {path for path, *_ in fields(SCHEMA)}
    found = set()
    for section in ("settings", "environment", "workload"):
        found |= {f"{section}.{name}" for name in fresh[section]}
    for name, part in fresh["settings"].items():
        found |= {f"settings.{name}.{entry}" for entry in part}
    assert found <= known, f"describe these in the schema: {sorted(found - known)}"
