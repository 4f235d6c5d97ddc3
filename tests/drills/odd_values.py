"""Gives every option of every command values that no one means, and looks at how each ends.

`python tests/drills/odd_values.py` counts them by command; the test beside this file does the same with fewer values.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
from pathlib import Path

from damaged_files import bound_memory, run_command, wrong_end

from vitgraph.cli import app
from vitgraph.commands.options import specs_of_commands
from vitgraph.errors import EXIT_HUB
from vitgraph.specs.fields import Option, options_of

VALUES_AN_OPTION = 3

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
WITH_OPTIONS = sorted({command for command, *_ in OPTIONS})


def fill_folder() -> None:
    """Puts what no reader expects into the current folder."""
    os.mkfifo("pipe")
    Path("junk").write_bytes(random.Random(1).randbytes(400))
    Path("eps.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%stderr%) (w) file\n")
    Path("folder").mkdir()


def wrong_with(command: str, entry: Option, value: str) -> str | None:
    """What a user should not be shown of a command with this value, or None."""
    needed = NEEDED.get(command, ())
    words = [*command.split(), *(MEASURING if needed == 1 else needed)]
    status, text = run_command([*words, *([] if entry.is_argument else [entry.names[0]]), value])
    # A name that could be a hub's is asked for there, and the hub may not answer.
    is_of_hub = status == EXIT_HUB and "the hub cannot be reached" in " ".join(text.split())
    wrong = wrong_end(2 if is_of_hub else status, text)
    if wrong is None and "\u202e" in text:
        wrong = "a mark that turns the text around reaches the terminal"
    return None if wrong is None else f"{command} {entry.names} {value[:80]!r}: {wrong}"


def drawn_values(command: str, key: str, count: int) -> list[str]:
    return random.Random(f"{command} {key}").sample(VALUES, count)


def wrong_of_command(command: str, count: int) -> list[str]:
    """What is wrong with any of so many values of every option of a command, run in the current folder."""
    return [
        wrong
        for name, key, entry in OPTIONS
        if name == command
        for value in drawn_values(command, key, count)
        if (wrong := wrong_with(command, entry, value)) is not None
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=VALUES_AN_OPTION, help=f"of each option, of {len(VALUES)}")
    parser.add_argument("--command", action="append", help="only this command; may be repeated")
    options = parser.parse_args()
    bound_memory()
    os.environ.pop("VITGRAPH_DEBUG", None)
    all_wrong = []
    sys.stdout.write("| command | options | values | wrong |\n|---|---:|---:|---:|\n")
    for command in options.command or WITH_OPTIONS:
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
            fill_folder()
            wrong = wrong_of_command(command, options.values)
        count = sum(name == command for name, *_ in OPTIONS)
        sys.stdout.write(f"| `{command}` | {count} | {count * options.values} | {len(wrong)} |\n")
        sys.stdout.flush()
        all_wrong += wrong
    sys.stdout.write("\n".join(all_wrong) + "\n")
    return int(bool(all_wrong))


if __name__ == "__main__":
    sys.exit(main())
