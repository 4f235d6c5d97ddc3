"""Who may import whom: rooms have a direction, output needs no torch, and no module grows too long."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "vitgraph"
HEAVY = {"torch", "transformers"}
MOST_LINES = 400
LONGER = {
    "ranks/group.py": "one protocol between ranks",
}
"""Modules above `MOST_LINES` lines, each with why it is not two."""


class Imported(NamedTuple):
    """An import of a module: what, and whether importing the module already does it."""

    name: str
    at_once: bool


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(node: ast.AST, at_once: bool = True) -> Iterator[Imported]:
    """Everything that is imported under `node`, also inside functions, but not for types alone."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    if isinstance(node, ast.Import):
        yield from (Imported(alias.name, at_once) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield Imported(inner if inner in MODULES else node.module, at_once)
    at_once = at_once and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from imports_of(child, at_once)


@functools.cache
def imports() -> dict[str, set[Imported]]:
    """What each module imports."""
    return {name: set(imports_of(ast.parse(path.read_text(encoding="utf-8")))) for name, path in MODULES.items()}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@functools.cache
def room_graph() -> dict[str, set[str]]:
    """The other rooms that each room imports from; a module beside the rooms is one of its own."""
    graph: dict[str, set[str]] = {}
    for name, imported in imports().items():
        found = {each.name for each in imported}
        rooms = {room_of(other) for other in found if other.split(".")[0] == "vitgraph"}
        graph.setdefault(room_of(name), set()).update(rooms - {room_of(name), ""})
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Rooms each of which imports the next, and the last the first; none where there is no circle."""
    done: set[str] = set()

    def follow(room: str, way: list[str]) -> list[str]:
        if room in way:
            return way[way.index(room) :]
        if room not in done:
            for other in sorted(graph.get(room, ())):
                if found := follow(other, [*way, room]):
                    return found
            done.add(room)
        return []

    return next((found for room in sorted(graph) if (found := follow(room, []))), [])


def test_no_circle_between_rooms() -> None:
    assert circle_in(room_graph()) == []


def test_a_circle_would_be_noticed() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("errors", set()),
        ("planning", {"errors"}),
        ("records", {"errors", "planning", "reading", "specs"}),
        ("report", {"errors", "planning", "records", "predict"}),
        ("models", {"attention", "errors", "hub", "planning", "reading"}),
        ("graphs", {"errors", "models", "planning"}),
        ("predict", {"errors", "models", "planning", "records", "specs", "workloads"}),
    ],
)
def test_a_room_imports_only_what_it_stands_on(room: str, allowed: set[str]) -> None:
    """Also inside functions: families know no records and no reports, and those know nothing that measures."""
    assert room_graph()[room] <= allowed


def test_only_the_command_line_imports_commands() -> None:
    assert {room for room, others in room_graph().items() if "commands" in others} == {"__main__", "cli"}
    assert {room for room, others in room_graph().items() if "cli" in others} == {"__main__"}


def test_the_graph_manager_knows_no_family_and_no_backend() -> None:
    found = {each.name for name in MODULES if room_of(name) == "graphs" for each in imports()[name]}
    known = {"vitgraph.models.base", "vitgraph.models.geometry"}
    assert {name for name in found if name.startswith(("vitgraph.models", "vitgraph.attention"))} <= known


def reached(start: set[str]) -> set[str]:
    """Modules that importing these imports at once, and what those import in turn."""
    seen: set[str] = set()
    pending = list(start)
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += [each.name for each in imports().get(name, ()) if each.at_once]
    return seen


@pytest.mark.parametrize("room", ["planning", "records", "report", "predict", "workloads", "specs"])
def test_pure_and_output_rooms_do_without_torch(room: str) -> None:
    own = {name for name in MODULES if room_of(name) == room}
    inside = {each.name.split(".")[0] for name in own for each in imports()[name]}
    assert not inside & HEAVY
    assert not {name.split(".")[0] for name in reached(own)} & HEAVY


def test_modules_are_short() -> None:
    lengths = {str(p.relative_to(PACKAGE)): len(p.read_text(encoding="utf-8").splitlines()) for p in MODULES.values()}
    long = {name for name, lines in lengths.items() if lines > MOST_LINES}
    assert not long - set(LONGER), "split them, or say in LONGER why not"
    assert set(LONGER) <= set(lengths)


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'pandas', 'matplotlib', 'pyarrow', 'yaml'}"
    program = (
        "import sys; from typer.testing import CliRunner; from vitgraph.cli import app\n"
        "for words, shown in (['--help'], 'bench'), (['bench', '-h'], '--model'), (['workload', '-h'], 'make'):\n"
        "    result = CliRunner().invoke(app, words); assert result.exit_code == 0, result.output\n"
        "    assert shown in result.output\n"
        f"assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
