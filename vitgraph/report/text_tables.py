"""Writes the improvements of saved runs as Markdown and LaTeX tables: one a model, workload and device, a row a run.

The columns are those of upstream's published tables; beneath each improvement stands what may be claimed of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitgraph.records.saved_runs import SavedRun
from vitgraph.report.claims import (
    IMPROVEMENT_NOTE,
    backend_text,
    claim_of,
    command_text,
    remark_of,
    scenario_of,
)

_METRICS = ("mean", "p99")
_HEADERS = ("Backend", "Mean latency improvement", "P99 latency improvement")
_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "→": r"$\rightarrow$",
    "…": r"\dots{}",
    "–": "--",
    "−": "$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "<": r"$<$",
    ">": r"$>$",
}
_MARKDOWN_SPECIAL = "\\`*_[]<>|"


@dataclass(frozen=True, slots=True)
class _Group:
    """Runs that share a table.

    Attributes:
        device: The device.
        model: The model as given.
        weights: What its weights are, or empty.
        workload: Name of the workload.
        size: How much was measured.
        runs: The runs, in the order given.
    """

    device: str
    model: str
    weights: str
    workload: str
    size: str
    runs: tuple[SavedRun, ...]

    @property
    def names_runs(self) -> bool:
        """True when the backend alone does not tell the rows apart."""
        return len({backend_text(run.record) for run in self.runs}) < len(self.runs)


def markdown_tables(runs: Sequence[SavedRun]) -> str:
    """The tables as Markdown, each with the commands that made it."""
    return "\n".join(_markdown_group(group) for group in _groups(runs))


def latex_tables(runs: Sequence[SavedRun]) -> str:
    """The tables as LaTeX floats; they need the package `booktabs`."""
    return "\n".join(["% Needs \\usepackage{booktabs}.", *(_latex_group(group) for group in _groups(runs))])


def _groups(runs: Sequence[SavedRun]) -> list[_Group]:
    found: dict[tuple[str, str, str, str, str, str], list[SavedRun]] = {}
    for run in runs:
        found.setdefault(scenario_of(run.record), []).append(run)
    return [
        _Group(device, model, weights, workload, size, tuple(members))
        for (device, model, weights, workload, size, _), members in found.items()
    ]


def _remarks(group: _Group) -> list[str]:
    """What a reader must know of single rows: why one is incomplete, not valid, or no measurement of a GPU."""
    remarks = []
    for run in group.runs:
        record = run.record
        name = run.name if group.names_runs or record.backend_used is None else backend_text(record)
        remark = remark_of(record)
        if remark:
            remarks.append(f"{name}: {remark}")
    return remarks


def _markdown_group(group: _Group) -> str:
    headers = (*(("Run",) if group.names_runs else ()), *_HEADERS)
    weights = f" ({group.weights})" if group.weights else ""
    lines = [
        f"### {markdown_text(group.device)}",
        "",
        f"Model: `{group.model}`{weights}, workload: `{group.workload}` ({group.size}).",
        "",
        markdown_row(headers),
        markdown_row([":--"] * len(headers)),
    ]
    for run in group.runs:
        claims = [claim_of(run.record, metric) for metric in _METRICS]
        cells = [
            markdown_text(claim.headline) + (f"<br>{markdown_text(claim.note)}" if claim.note else "")
            for claim in claims
        ]
        name = [markdown_text(run.name)] if group.names_runs else []
        lines.append(markdown_row([*name, markdown_text(backend_text(run.record)), *cells]))
    lines += ["", IMPROVEMENT_NOTE, *(f"\n{markdown_text(remark)}." for remark in _remarks(group))]
    lines += ["", "To reproduce:", "", "```bash"]
    lines += ["\n\n".join(dict.fromkeys(command_text(run.record["command"]) for run in group.runs)), "```", ""]
    return "\n".join(lines)


def markdown_row(cells: Sequence[str]) -> str:
    """A row of a Markdown table; the cells must be escaped."""
    return f"| {' | '.join(cells)} |"


def markdown_text(text: str) -> str:
    """Text that Markdown prints as it is."""
    return "".join(f"\\{character}" if character in _MARKDOWN_SPECIAL else character for character in text)


def _latex_group(group: _Group) -> str:
    headers = (*(("Run",) if group.names_runs else ()), *_HEADERS)
    weights = f" ({group.weights})" if group.weights else ""
    caption = f"{group.model}{weights} on {group.device}, workload {group.workload} ({group.size}). {IMPROVEMENT_NOTE}"
    remarks = "".join(f" {remark}." for remark in _remarks(group))
    lines = [
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{latex_text(caption + remarks)}}}",
        f"  \\begin{{tabular}}{{{'l' * len(headers)}}}",
        r"    \toprule",
        f"    {' & '.join(headers)} \\\\",
        r"    \midrule",
    ]
    for run in group.runs:
        claims = [claim_of(run.record, metric) for metric in _METRICS]
        name = [latex_text(run.name)] if group.names_runs else []
        cells = [*name, latex_text(backend_text(run.record)), *(latex_text(claim.headline) for claim in claims)]
        lines.append(f"    {' & '.join(cells)} \\\\")
        if any(claim.note for claim in claims):
            notes = [f"{{\\footnotesize {latex_text(claim.note)}}}" if claim.note else "" for claim in claims]
            lines.append(f"    {' & '.join([*[''] * len(name), '', *notes]).lstrip()} \\\\")
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""]
    return "\n".join(lines)


def latex_text(text: str) -> str:
    """Text as LaTeX prints it; a minus before a digit becomes a real one."""
    characters = []
    for index, character in enumerate(text):
        starts_number = character == "-" and text[index + 1 : index + 2].isdigit()
        is_minus = starts_number and (index == 0 or text[index - 1] in " (")
        characters.append("$-$" if is_minus else _LATEX_ESCAPES.get(character, character))
    return "".join(characters)
