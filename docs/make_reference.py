"""The reference pages, made from options, types of records and columns of tables: `python docs/make_reference.py`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from vitgraph.cli import app
from vitgraph.commands.options import shown_default, specs_of_commands
from vitgraph.errors import EXIT_STATUSES
from vitgraph.planning.budgets import EncoderItemSpec
from vitgraph.predict.engine_rules import (
    FAMILIES,
    FRAMES_RULE,
    ITEMS_RULE,
    LIMITS,
    MANAGER_FILE,
    PATH_RULE,
    ROUNDING_RULE,
    UNIT_RULE,
    WITHOUT_GRAPHS,
)
from vitgraph.records import sample_table
from vitgraph.records.record import RECORDS, Record
from vitgraph.records.sections import NOT_FINITE
from vitgraph.report.columns import Table
from vitgraph.report.documents import COLUMNS_TABLE
from vitgraph.report.views import bench, compare, graph_tables, machine, parts, plan, ranks, runs, tune
from vitgraph.specs.fields import Option, options_of

RECORDS_INTRODUCTION = """# Records

What every command leaves behind: a folder with `run.json`, and in most kinds `samples.csv` beside it, which holds every
timed call. The samples are the truth: latencies and comparisons are derived from them, and `vitgraph export` rebuilds
every table and plot from the two files, without a GPU and without torch. `vitgraph calibrate` writes one file.

This page and the [JSON Schema](records.schema.json) are made from the types in `vitgraph/records/` by
`python docs/make_reference.py`. They describe format 2, the only one that is read.

```bash
python -m pip install check-jsonschema
check-jsonschema --schemafile docs/records.schema.json runs/my-run/run.json
```

- Not measured is null, never 0. A number that is not finite is the string `"nan"`, `"inf"` or `"-inf"`.
- `status` decides what there is. A run that was stopped or failed keeps what it measured and says why it ended. A run
  whose outputs were wrong has no latency.
- An improvement is (first - second) / first in percent: positive means that the second is faster, everywhere.
- A sample is a call. Figures "a request" count a call as often as it has requests, each with its share of the time.
- Hits and misses are all items, and the misses by reason add up to the misses; a record that breaks this is refused.
- Fields that this page does not have are refused.
"""


Schema = dict[str, Any]
_WORDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "null"}


def records_page() -> str:
    """The reference page of records in Markdown."""
    defs = _schemas(Record)
    parts = ["## Every record\n", _document(defs["Record"]), "", *_table(defs["Record"], defs)]
    own = {"Record"}
    for record in dict.fromkeys(RECORDS.values()):
        kinds = " and ".join(f"`{kind}`" for kind, of in RECORDS.items() if of is record)
        field = defs[record.__name__]["properties"]["result"]
        result = next(filter(None, map(_section, field.get("anyOf", [field]))))
        parts += ["", f"## {kinds}\n", _document(defs[record.__name__]), "", *_table(defs[result], defs)]
        own |= {record.__name__, result}
    rows = [f"| `{name}` | {meaning} |" for name, meaning in sample_table.MEANINGS.items()]
    parts += [
        "",
        "## samples.csv\n",
        inspect.getdoc(sample_table) or "",
        "",
        "| Column | Meaning |",
        "|---|---|",
        *rows,
    ]
    parts += ["", "## Sections\n", "What the tables above refer to, by name."]
    for name in sorted(defs.keys() - own - {"JsonValue"}):
        parts += ["", f"### {name}\n", _document(defs[name]), "", *_table(defs[name], defs)]
    return "\n".join([RECORDS_INTRODUCTION, *parts]) + "\n"


def records_schema() -> str:
    """The JSON Schema of every kind of record in one."""
    defs = _schemas()
    named = ",\n".join(f"{json.dumps(name)}: {json.dumps(of)}" for name, of in sorted(defs.items()))
    any_of = [{"$ref": f"#/$defs/{record.__name__}"} for record in dict.fromkeys(RECORDS.values())]
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A record of vitgraph, format 2",
        "anyOf": any_of,
    }
    return f'{json.dumps(head)[:-1]}, "$defs": {{\n{named}\n}}}}\n'


def _schemas(*more: type[Record]) -> Schema:
    """The schema of every record and section by its name."""
    records = dict.fromkeys((*more, *RECORDS.values()))
    defs: Schema = models_json_schema([(record, "serialization") for record in records])[1]["$defs"]
    item = TypeAdapter(EncoderItemSpec).json_schema()
    count = {
        "type": "integer",
        "minimum": 1,
        "default": 1,
        "description": "How often it stands here, one after the other.",
    }
    return defs | {"EncoderItemSpec": item | {"properties": {"count": count, **item["properties"]}}}


def _document(of: Schema) -> str:
    return str(of["description"]).partition("Attributes:")[0].strip()


def _table(of: Schema, defs: Schema) -> list[str]:
    # A dataclass of planning has the meanings in its docstring, and a section that has a field's own is not said twice.
    meanings = dict(re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", of["description"], re.MULTILINE))
    rows = ["| Field | Type | Meaning |", "|---|---|---|"]
    for name, field in of["properties"].items():
        meaning = field.get("description") or meanings.get(name) or _document(defs[_section(field)])
        rows.append(f"| `{name}` | {_type(field)} | {' '.join(meaning.split())} |")
    return rows


def _section(of: Schema) -> str:
    """The section that a field refers to; empty for a plain type."""
    return str(of.get("$ref", "")).rpartition("/")[2].replace("JsonValue", "")


def _type(of: Schema) -> str:
    """A type in words; sections are links."""
    if name := _section(of):
        return f"[{name}](#{name.lower()})"
    if "anyOf" in of:
        kinds = [one for one in of["anyOf"] if one.get("enum") != list(NOT_FINITE)]
        return " or ".join(dict.fromkeys(map(_type, kinds)))
    if "const" in of or "enum" in of:
        return " or ".join(f"`{json.dumps(value)}`" for value in of.get("enum", [of.get("const")]))
    match of.get("type"):
        case "array" if "prefixItems" in of:
            return f"list of {len(of['prefixItems'])}: {', '.join(map(_type, of['prefixItems']))}"
        case "array":
            return f"list of {_type(of['items'])}"
        case "object":
            return f"by name: {_type(of['additionalProperties'])}"
        case "number" if of.get("maximum") == 1:
            return "0 to 1"
        case "number" if of.get("minimum") == 0:
            return "number ≥ 0"
        case kind:
            return _WORDS.get(str(kind), "any JSON")


TABLES: dict[str, tuple[Table, ...]] = {
    "bench": (
        *(runs.RUNS, bench.SUMMARY, graph_tables.PER_BUDGET, graph_tables.PER_PATH, graph_tables.MONOLITHIC_SPEC),
        *(graph_tables.MISSES, graph_tables.DROPPED, ranks.RANKS, runs.SAMPLES, ranks.SCALING),
    ),
    "export --compare": (runs.COMPARISON,),
    "compare-backends, and bench --compile-rows": (compare.BACKENDS, ranks.RANKS, compare.MANY),
    "compare-backends --micro": (parts.MICRO, parts.CROSSINGS),
    "profile": (parts.KINDS,),
    "tune-budgets": (tune.SETTINGS, tune.BUDGETS),
    "calibrate": (parts.CURVE,),
    "verify": (machine.CHECKS,),
    "workload inspect": (plan.DISTRIBUTIONS,),
    "every export": (COLUMNS_TABLE,),
}
"""The tables of files, by the command that they are of."""

TABLES_INTRODUCTION = """# Tables

Made from the columns that reports declare, by `python docs/make_reference.py`. A table has one fact a row, one
header row and fixed columns; an export of bench runs has the column `run` before them. What was not measured is an
empty cell in CSV and null in Parquet. CSV has six significant digits, times of samples ten; Parquet holds numbers
whole, and each field's unit and meaning as metadata. A text that a spreadsheet would take for a formula has a quote
before it. Every improvement is (base - other) / base: positive is faster.
"""


def tables_page() -> str:
    """The reference page of tables in Markdown."""
    parts = [TABLES_INTRODUCTION]
    seen: set[str] = set()
    for command, specs in TABLES.items():
        parts.append(f"## {command}\n")
        for spec in specs:
            if spec.name in seen:
                parts.append(f"`{spec.name}`: as above.\n")
                continue
            seen.add(spec.name)
            counts = f" Figures count {spec.counts}." if spec.counts else ""
            rows = (f"| `{one.name}` | {one.kind} | {one.unit} | {one.meaning} |" for one in spec.columns)
            head = "| Column | Kind | Unit | Meaning |\n|---|---|---|---|"
            parts.append(f"### {spec.name}\n\nOne row {spec.one_row}.{counts}\n\n{head}\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


_KINDS = {"str": "text", "int": "integer", "float": "number", "bool": "switch", "Path": "path"}


def options_page() -> str:
    """The page of all commands' options and of the exit statuses, in Markdown."""
    lines = [
        "# Options",
        "",
        "Made from the fields of the specs by `python docs/make_reference.py`. Every option is a key of the",
        "YAML file that `--config` names, too (without the dashes, with underscores); flags win over the file.",
    ]
    for name, spec in specs_of_commands(app).items():
        lines += ["", f"## vitgraph {name}", "", "| option | takes | default | |", "|---|---|---|---|"]
        lines += [_option_row(option) for option in options_of(spec).values()]
    lines += ["", "## Exit statuses", "", "| status | meaning |", "|---|---|"]
    lines += [f"| {status} | {meaning} |" for status, meaning in EXIT_STATUSES.items()]
    return "\n".join(lines) + "\n"


def _option_row(option: Option) -> str:
    kind = _KINDS.get(getattr(option.kind, "__name__", ""), "two paths")
    several = ", repeatable" if option.is_repeatable else ""
    names = ", ".join(f"`{name}`" for name in option.names)
    default = None if option.default is dataclasses.MISSING else shown_default(option)
    shown = "" if default is None or default is False else f"`{default}`"
    help_text = option.help.replace("|", "\\|")
    return f"| {names} | {kind}{several} | {shown} | {help_text} |"


def rules_table() -> str:
    """The rules by family, as a Markdown table; `in-vllms-manager.md` holds it."""
    rows = ["| family | read from | what a list must keep |", "|---|---|---|"]
    rows.append(f"| every family | `{MANAGER_FILE}` | {ITEMS_RULE}. Models of two paths: {PATH_RULE} |")
    for family in FAMILIES:
        texts = [LIMITS[family.limit][0]] if family.limit else []
        texts += [ROUNDING_RULE] if family.rounds_down else []
        texts += [UNIT_RULE] if family.needs_whole_unit else []
        texts += ["frames hold the longest videos (below)"] if family.segments_held else []
        texts += [family.note] if family.note else []
        rows.append(f"| {family.name} | `{family.file}` | {'. '.join(text[0].upper() + text[1:] for text in texts)} |")
    eager = ", ".join(f"{name} (`{file}`)" for name, file in WITHOUT_GRAPHS.items())
    return "\n".join([*rows, "", f"Frames: {FRAMES_RULE}.", "", f"Without encoder graphs there: {eager}."])


PAGES = {
    "options.md": options_page,
    "records.md": records_page,
    "records.schema.json": records_schema,
    "tables.md": tables_page,
}
"""What makes each file of this folder."""


def main() -> None:
    """Writes the pages."""
    for name, text in PAGES.items():
        Path(__file__).with_name(name).write_text(text(), encoding="utf-8")
        sys.stdout.write(f"wrote docs/{name}\n")


if __name__ == "__main__":
    main()
