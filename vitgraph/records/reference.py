"""The reference page of records and their JSON Schema, made from the types: `python -m vitgraph.records.reference`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter

from vitgraph.records import sample_table
from vitgraph.records.record import RECORDS, Record
from vitgraph.records.sections import Count, Finite, Number, Share, Time

PAGE, SCHEMA = Path("docs/records.md"), Path("docs/records.schema.json")
INTRODUCTION = """# Records

What every command leaves behind: a folder with `run.json`, and in most kinds `samples.csv` beside it, which holds every
timed call. The samples are the truth: latencies and comparisons are derived from them, and `vitgraph export` rebuilds
every table and plot from the two files, without a GPU and without torch. `vitgraph calibrate` writes one file.

This page and the [JSON Schema](records.schema.json) are made from the types in `vitgraph/records/` by
`python -m vitgraph.records.reference`. They describe format 2, the only one that is read.

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


def page() -> str:
    """The reference page in Markdown."""
    shown: dict[str, type] = {}
    parts = [INTRODUCTION, _section("Every record", Record, shown, with_text=True)]
    for kinds, record in _records():
        result = record.model_fields["result"].annotation
        parts.append(f"## {' and '.join(f'`{kind}`' for kind in kinds)}\n\n{_document(record)}\n")
        parts += [_section("", kind, shown, with_text=False) for kind in _types_in(result)]
    parts.append(_samples())
    parts.append("## Sections\n\nWhat the tables above refer to, by name.\n")
    sections: dict[str, str] = {}
    # Sections name further ones, which are then shown too.
    while left := shown.keys() - sections.keys():
        sections |= {name: _section(name, shown[name], shown, with_text=True, level=3) for name in sorted(left)}
    parts += [sections[name] for name in sorted(sections)]
    return "\n".join(parts).rstrip() + "\n"


def schema() -> str:
    """The JSON Schema of every kind of record in one."""
    union: Any = Union[tuple(dict.fromkeys(RECORDS.values()))]  # noqa: UP007
    found = TypeAdapter(union).json_schema(mode="serialization")
    named = ",\n".join(f"{json.dumps(name)}: {json.dumps(of)}" for name, of in sorted(found.pop("$defs").items()))
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A record of vitgraph, format 2"}
    return f'{json.dumps(head | found)[:-1]}, "$defs": {{\n{named}\n}}}}\n'


def _records() -> list[tuple[list[str], type[Record]]]:
    records = dict.fromkeys(RECORDS.values())
    return [([kind for kind, of in RECORDS.items() if of is record], record) for record in records]


def _samples() -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in sample_table.MEANINGS.items()]
    lines = ["## samples.csv", "", f"{_document(sample_table)}", "", "| Column | Meaning |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _section(title: str, kind: type, shown: dict[str, type], *, with_text: bool, level: int = 2) -> str:
    lines = [f"{'#' * level} {title}", ""] if title else []
    lines += [_document(kind), ""] if with_text else []
    lines += ["| Field | Type | Meaning |", "|---|---|---|"]
    for name, annotation, meaning in _fields(kind):
        lines.append(f"| `{name}` | {_type(annotation, shown)} | {' '.join(meaning.split())} |")
    return "\n".join(lines) + "\n"


def _fields(kind: type) -> Iterator[tuple[str, Any, str]]:
    found = kind.model_fields if issubclass(kind, BaseModel) else getattr(kind, "__pydantic_fields__", None)
    if found is None:
        documented = _attributes(kind)
        for one in dataclasses.fields(kind):
            yield one.name, str(one.type), documented.get(one.name, "")
        return
    for name, info in found.items():
        # What pydantic takes out of an annotation is put back, so that a count is told from any whole number.
        extras = tuple(info.metadata)
        yield name, Annotated[(info.annotation, *extras)] if extras else info.annotation, info.description or ""


def _attributes(kind: type) -> dict[str, str]:
    """Meanings in the `Attributes:` part of a docstring."""
    found: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(kind) or "").partition("Attributes:\n")[2].splitlines():
        head, colon, text = line.strip().partition(": ")
        if line.startswith("    ") and not line.startswith("     ") and colon:
            name, found[head] = head, text
        elif name:
            found[name] += f" {line.strip()}"
    return found


def _document(thing: Any) -> str:
    text = inspect.getdoc(thing) or ""
    return text.partition("Attributes:")[0].strip()


_WORDS = {Number: "number", Finite: "number", Time: "number ≥ 0", Share: "0 to 1", Count: "whole number"}
_PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}


def _type(annotation: Any, shown: dict[str, type]) -> str:
    """A type in words; sections are links."""
    if isinstance(annotation, str):
        return f"`{annotation}`"
    for known, words in _WORDS.items():
        if annotation == known:
            return words
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        words = _type(arguments[0], shown)
        return "0 to 1" if words == "number" and _bounds(arguments) == (0, 1) else words
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(one, shown) for one in arguments))
    if origin is tuple:
        inner = [_type(one, shown) for one in arguments if one is not Ellipsis]
        return f"list of {inner[0]}" if Ellipsis in arguments else f"list of {len(inner)}: {', '.join(inner)}"
    if origin is dict:
        return f"by name: {_type(arguments[1], shown)}"
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        shown[annotation.__name__] = annotation
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return "any JSON"


def _bounds(arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    marks = [mark for one in arguments[1:] for mark in (getattr(one, "metadata", None) or [one])]
    low = next((mark.ge for mark in marks if hasattr(mark, "ge")), None)
    return low, next((mark.le for mark in marks if hasattr(mark, "le")), None)


def _types_in(annotation: Any) -> list[type]:
    """The section of an annotation, without null."""
    return [one for one in get_args(annotation) or (annotation,) if one is not type(None)]


def main() -> None:
    """Writes both files, from the root of the repository."""
    PAGE.write_text(page(), encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE} and {SCHEMA}\n")


if __name__ == "__main__":
    main()
