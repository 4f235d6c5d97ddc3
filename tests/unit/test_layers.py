"""Who may import whom: planning is pure, output needs no torch, the graph manager names no family or backend."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vitgraph"
TORCH_FREE = ["planning", "report", "workloads", "tuning/search.py", "predict", "records"]
HEAVY = {"torch", "transformers"}


def module_level_imports(path: Path) -> set[str]:
    """Modules that importing the file imports: not those inside functions or under TYPE_CHECKING."""
    found: set[str] = set()
    pending: list[ast.stmt] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            pending += node.body + node.orelse
        elif isinstance(node, ast.Try):
            pending += node.body
    return found


def files(part: str) -> list[Path]:
    path = PACKAGE / part
    return sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []


@pytest.mark.parametrize("path", [p for part in TORCH_FREE for p in files(part)], ids=lambda p: str(p.name))
def test_pure_and_output_layers_do_not_import_torch(path: Path) -> None:
    assert not {name.split(".")[0] for name in module_level_imports(path)} & HEAVY


@pytest.mark.parametrize("path", files("planning"), ids=lambda p: p.name)
def test_planning_imports_only_itself_and_the_errors(path: Path) -> None:
    own = {name for name in module_level_imports(path) if name.startswith("vitgraph")}
    assert all(name.startswith(("vitgraph.planning", "vitgraph.errors")) for name in own)


@pytest.mark.parametrize("path", files("graphs"), ids=lambda p: p.name)
def test_the_graph_manager_knows_no_family_and_no_backend(path: Path) -> None:
    own = {name for name in module_level_imports(path) if name.startswith(("vitgraph.models", "vitgraph.attention"))}
    assert own <= {"vitgraph.models.base", "vitgraph.models.metadata", "vitgraph.models.geometry"}


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
