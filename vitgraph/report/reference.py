"""The reference page of tables, made from their columns: `python -m vitgraph.report.reference`."""

from __future__ import annotations

import sys
from pathlib import Path

from vitgraph.report.columns import Table
from vitgraph.report.to_files import COLUMNS_TABLE
from vitgraph.report.views import (
    bench,
    compare,
    compile_rows,
    graph_tables,
    machine,
    parts,
    ranks,
    runs,
    tune,
    workload,
)

PAGE = Path("docs/tables.md")
TABLES: dict[str, tuple[Table, ...]] = {
    "bench": (
        *(runs.RUNS, bench.SUMMARY, graph_tables.PER_BUDGET, graph_tables.PER_PATH, graph_tables.MONOLITHIC_SPEC),
        *(graph_tables.MISSES, graph_tables.DROPPED, ranks.RANKS, runs.SAMPLES, ranks.SCALING),
    ),
    "export --compare": (runs.COMPARISON,),
    "compare-backends, and bench --compile-rows": (compare.BACKENDS, ranks.RANKS, compile_rows.MANY),
    "compare-backends --micro": (parts.MICRO, parts.CROSSINGS),
    "profile": (parts.KINDS,),
    "tune-budgets": (tune.SETTINGS, tune.BUDGETS),
    "calibrate": (parts.CURVE,),
    "verify": (machine.CHECKS,),
    "workload inspect": (workload.DISTRIBUTIONS,),
    "every export": (COLUMNS_TABLE,),
}
"""The tables of files, by the command that they are of."""

INTRODUCTION = """# Tables

Made from the columns that reports declare, by `python -m vitgraph.report.reference`. A table has one fact a row, one
header row and fixed columns; an export of bench runs has the column `run` before them. What was not measured is an
empty cell in CSV and null in Parquet. CSV has six significant digits, times of samples ten; Parquet holds numbers
whole, and each field's unit and meaning as metadata. A text that a spreadsheet would take for a formula has a quote
before it. Every improvement is (base - other) / base: positive is faster.
"""


def page() -> str:
    """The page."""
    parts = [INTRODUCTION]
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


def main() -> None:
    """Writes the page, from the root of the repository."""
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")


if __name__ == "__main__":
    main()
