"""Every `vitgraph` command in a bash block of README.md and docs/: its options exist, and what can run dry does."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer.main
from PIL import Image
from typer.testing import CliRunner

from vitgraph.cli import app

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "README.md", ROOT / "configs" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PAGES = [path for path in SOURCES if path.exists()]
BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
RUN_AS_THEY_ARE = {"models", "doctor", "import", "workload"}
"""Commands that need neither a GPU nor a saved run; of the others, those with --dry-run are run with it."""


def commands_of(page: Path) -> list[list[str]]:
    found = []
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words and words[0] == "vitgraph":
                found.append(words[1:])
    return found


COMMAND: Any = typer.main.get_command(app)
COMMANDS = [(page.name, words) for page in PAGES for words in commands_of(page)]


def parse(words: list[str]) -> tuple[str, Any]:
    """The command that the words name, after its options were parsed; an unknown option ends here."""
    command, names = COMMAND, []
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command = command.commands[words[0]]
        names.append(words[0])
        words = words[1:]
    command.make_context(" ".join(names), list(words))
    return names[0], command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with the files that the pages speak of."""
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (640, 480)).save(tmp_path / "photos" / "a.png")
    (tmp_path / "requests.jsonl").write_text(json.dumps({"image_sizes": [[640, 480]]}))
    (tmp_path / "access.log").write_text('1.2.3.4 - - "POST /v1/chat/completions" 200 size=640x480\n')
    # A folder of the data set's name is taken for a local copy of it.
    (tmp_path / "lmarena-ai" / "VisionArena-Chat").mkdir(parents=True)
    image = {"bytes": (tmp_path / "photos" / "a.png").read_bytes(), "path": None}
    pq.write_table(pa.table({"images": [[image]] * 20}), tmp_path / "lmarena-ai" / "VisionArena-Chat" / "part.parquet")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_page_of_a_task_shows_commands() -> None:
    shown = {name for name, _ in COMMANDS}
    tasks = {"choose-budgets", "choose-a-backend", "add-a-model", "add-a-backend", "run-on-several-gpus"}
    assert {f"{task}.md" for task in (*tasks, "compile-the-blocks", "how-we-measure")} <= shown


@pytest.mark.slow
@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(w)[:60]}" for page, w in COMMANDS])
def test_a_command_parses_and_runs_dry(page: str, words: list[str], folder: Path) -> None:
    if words[0].startswith("-"):
        assert CliRunner().invoke(app, words).exit_code == 0
        return
    name, command = parse(words)
    if page == "tasks.md":
        return  # Run whole, one after the other, by their own test.
    has_dry_run = any("--dry-run" in getattr(option, "opts", ()) for option in command.params)
    if name not in RUN_AS_THEY_ARE and not has_dry_run:
        return
    if has_dry_run and "--dry-run" not in words:
        words = [*words, "--dry-run"]
    if has_dry_run and {"--mm-encoder-attn-backend", "--config"} & set(words):
        # The pages name backends of a GPU, which a dry run refuses where there is none.
        words = [*words, "--mm-encoder-attn-backend", "auto"]
    if has_dry_run and any("--load-format" in getattr(option, "opts", ()) for option in command.params):
        # Weights of the hub are refused where it does not answer.
        words = [*words, "--load-format", "dummy"]
    if has_dry_run and not torch.cuda.is_available() and any(word.startswith("cuda") for word in words):
        words = [*words, "--device", "auto"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{page}: {result.output}"


def test_an_unknown_option_would_be_noticed() -> None:
    with pytest.raises(Exception, match="no-such-option"):
        parse(["bench", "--no-such-option", "1"])
