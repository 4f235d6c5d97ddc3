"""No value of any option of any command ends in a traceback, hangs, or reaches the terminal as an escape."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from damaged_files import run_command, wrong_end

from vitgraph.cli import app
from vitgraph.commands.options_page import specs_of_commands
from vitgraph.specs.fields import SpecOption, options_of

NEEDED = {
    **dict.fromkeys(("bench", "recommend", "tune-budgets", "compare-backends", "calibrate", "verify", "profile"), 1),
    "plan": ("--model", "qwen3-vl-debug", "--items", "96x64"),
    "import": ("vllm serve m/m",),
    "export": ("nowhere",),
    "sweep": ("nowhere.yaml",),
    "workload make": ("--output", "a.csv", "--num-prompts", "4"),
    "workload calls": ("--model", "qwen3-vl-debug", "--output", "a.csv", "--request-rate", "3", "--num-prompts", "4"),
    "workload convert": ("nowhere", "--output", "a.csv"),
}
MEASURING = ("--model", "qwen3-vl-debug", "--load-format", "dummy", "--device", "cpu", "--dry-run")
SKIPPED = {"json", "quiet", "debug", "dry_run", "overwrite"}

VALUES = (
    *("9" * 5000, str(2**63), str(2**31), "-1", "0", "nan", "inf", "1e-320", "1e400", "-1e308", "1:nan,2:0.5"),
    *("[" * 3000, '{"a":' * 2000, "[" * 400 + "]" * 400, '{"a": ' + "9" * 5000 + "}", '{"(1,1,1)": NaN}', "{}", "null"),
    *(
        "\x1b[31mred\u202e",
        "=1+1",
        r"$\frac{$",
        "\udcff\udcfe",
        "",
        " ",
        ",",
        "a" * 5000,
        "a\nb",
        "\x00",
        "%s{0}",
        "１２",
    ),
    *("/dev/zero", "pipe", "junk", "folder", "/proc/nope/x", "junk/x", "../../../etc/passwd", "~", "1x1", "0x0"),
    *("1000000000x1", "1x1x1000000000", "9*" * 20 + "1x1", "999999999*9x9", "image=1e9", '{"image": 1e999}', "eps.eps"),
)

OPTIONS = [
    (command, key, entry)
    for command, spec in specs_of_commands(app).items()
    for key, entry in options_of(spec).items()
    if key not in SKIPPED and not entry.is_flag
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with what no reader expects."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VITGRAPH_DEBUG", raising=False)
    os.mkfifo("pipe")
    Path("junk").write_bytes(random.Random(1).randbytes(400))
    Path("eps.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%stderr%) (w) file\n")
    Path("folder").mkdir()


def wrong_with(command: str, entry: SpecOption, value: str) -> str | None:
    """What a user should not be shown of a command with this value, or None."""
    needed = NEEDED.get(command, ())
    words = [*command.split(), *(MEASURING if needed == 1 else needed)]
    status, text = run_command([*words, *([] if entry.option.is_argument else [entry.names[0]]), value])
    wrong = wrong_end(status, text)
    if wrong is None and "\u202e" in text:
        wrong = "a mark that turns the text around reaches the terminal"
    return None if wrong is None else f"{command} {entry.names} {value[:80]!r}: {wrong}"


def drawn_values(command: str, key: str, count: int) -> list[str]:
    return random.Random(f"{command} {key}").sample(VALUES, count)


@pytest.mark.parametrize("command", sorted({command for command, *_ in OPTIONS}))
def test_an_odd_value_ends_in_words(command: str, place: None) -> None:
    options = [(key, entry) for name, key, entry in OPTIONS if name == command]
    drawn = random.Random(command)
    wrong = [
        wrong_with(command, entry, drawn.choice(VALUES)) for _, entry in drawn.sample(options, min(3, len(options)))
    ]
    assert not list(filter(None, wrong))


@pytest.mark.slow
@pytest.mark.parametrize(("command", "key", "entry"), OPTIONS, ids=[f"{c} {k}" for c, k, _ in OPTIONS])
def test_odd_values_of_every_option_end_in_words(command: str, key: str, entry: SpecOption, place: None) -> None:
    wrong = [wrong_with(command, entry, value) for value in drawn_values(command, key, 3)]
    assert not list(filter(None, wrong))
