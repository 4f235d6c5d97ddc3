"""Damages every kind of file that vitgraph reads, and shows that each ends in a line of text and a right exit status.

`python tests/drills/damaged_files.py` writes the table of `docs/drills.md` to the terminal; the test beside this file
runs the first of the same inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from every_command import print_table

ROOT = Path(__file__).resolve().parents[2]
INPUTS_A_KIND = 70
LIMIT_S = 30
"""Of a processor's time; a command that waits for something may wait ten times as long."""
MEMORY_BYTES = 16 * 2**30
RIGHT_ENDS = (0, 2, 3, 5)
"""Good after all, refused, nothing to replay, slower: a damaged file is none of the others."""

CONFIG = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
}
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 78400}
TRACE = "request,width,height,frames,fps\n" + "".join(f"r{n},{300 + n},200,{1 + n % 3},2\n" for n in range(8))
SETTINGS = (
    "model: qwen3-vl-debug\ntoken_budgets: 64,256\nnum_prompts: 4\nmax_vision_items_per_batch: 8\npacking: exact\n"
)
LOG = "".join(
    json.dumps({"request": n, "images": [{"width": 300 + n, "height": 200}, [640, 480]]}) + "\n" for n in range(6)
)
COMPILATION = {
    "cudagraph_mm_encoder": True,
    "encoder_cudagraph_token_budgets": [64, 256, 1024],
    "encoder_cudagraph_max_vision_items_per_batch": 8,
}


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        name: What it is.
        content: A sound one.
        file: Its path under the folder of an input; None for an option's text.
        command: Arguments from that folder and, for an option's text, from the text.
        beside: Other files of the folder.
    """

    name: str
    content: str
    file: str | None
    command: Callable[[Path, str], list[str]]
    beside: dict[str, str]


def kinds() -> list[Kind]:
    """Every kind of file and text that a user hands over."""
    run = next(folder for folder in (ROOT / "tests/data").iterdir() if (folder / "run.json").exists())
    record, samples = ((run / name).read_text(encoding="utf-8") for name in ("run.json", "samples.csv"))
    profile = (ROOT / "tests/data/synthetic-profile.json").read_text(encoding="utf-8")
    plan = ["plan", "--model", "qwen3-vl-debug"]
    export = lambda folder, _: ["export", str(folder), "--formats", "csv,markdown,html"]  # noqa: E731
    config = lambda folder, _: ["plan", "--model", str(folder), "--items", "300x300,64x64x4"]  # noqa: E731
    processor = json.dumps(PROCESSOR)
    return [
        Kind("run.json", record, "run.json", export, {"samples.csv": samples}),
        Kind("samples.csv", samples, "samples.csv", export, {"run.json": record}),
        Kind("config.json", json.dumps(CONFIG), "config.json", config, {"preprocessor_config.json": processor}),
        Kind("processor", processor, "preprocessor_config.json", config, {"config.json": json.dumps(CONFIG)}),
        Kind(
            "trace", TRACE, "t.csv", lambda f, _: [*plan, "--dataset-path", str(f / "t.csv"), "--num-prompts", "6"], {}
        ),
        Kind("settings", SETTINGS, "s.yaml", lambda f, _: ["plan", "--config", str(f / "s.yaml")], {}),
        Kind(
            "request log",
            LOG,
            "log.jsonl",
            lambda f, _: ["workload", "convert", str(f / "log.jsonl"), "--output", str(f / "out.csv")],
            {},
        ),
        Kind(
            "profile",
            profile,
            "p.json",
            lambda f, _: [*plan, "--items", "300x300", "--calibration", str(f / "p.json"), "--packing", "optimal"],
            {},
        ),
        Kind(
            "--compilation-config",
            json.dumps(COMPILATION),
            None,
            lambda _, text: [*plan, "--items", "300x300", "--compilation-config", text],
            {},
        ),
        Kind(
            "--mm-processor-kwargs",
            json.dumps({"size": {"shortest_edge": 3136, "longest_edge": 78400}}),
            None,
            lambda _, text: [*plan, "--items", "300x300", "--mm-processor-kwargs", text],
            {},
        ),
    ]


def config_of(preset: str) -> dict[str, Any]:
    """A config.json of a preset's model."""
    from vitgraph.models.registry import resolve_preset

    source = resolve_preset(preset)
    assert source is not None
    width = source.extra.get("text_hidden_size", 64)
    facts = {fact: value for fact, value in source.extra.items() if fact != "text_hidden_size"}
    text: dict[str, Any] = {"text_config": {"hidden_size": width}}
    if "query_num" in facts:
        text["hidden_size"] = width
    return {"architectures": [source.architecture], **text, **facts, "vision_config": dict(source.vision_config)}


def configs() -> list[Kind]:
    """The config.json of every row's small model."""
    from vitgraph.models.registry import ROWS

    plan = lambda folder, _: ["plan", "--model", str(folder), "--items", "300x300"]  # noqa: E731
    return [
        Kind(f"config.json, {row.name}", json.dumps(config_of(row.debug_preset)), "config.json", plan, {})
        for row in ROWS
    ]


# -- damage ------------------------------------------------------------------------------------------------------------

ODD_VALUES = (
    *(None, True, "", "nan", "x" * 300, [], {}, [[]], {"a": None}, -1, 0, 2**31, 2**63, 10**400, 0.5, -1e308, 1e-320),
    *(float("nan"), float("inf"), "../../etc/passwd", "\x1b[31m\u202e", "=1+1", [1] * 1000),
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def damage_json(text: str, drawn: random.Random) -> str:
    """One value of the document is another, is gone, is doubled or lies deep."""
    value = json.loads(text)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(child, dict | list):
                walk(child)

    walk(value)
    node, key = drawn.choice(places)
    choice = drawn.random()
    if choice < 0.2:
        del node[key]
    elif choice < 0.3:
        node[key] = nested(drawn.choice((40, 400)))
    elif choice < 0.4 and isinstance(node, dict):
        node[f"{key}s"] = node[key]
    else:
        node[key] = drawn.choice(ODD_VALUES)
    return json.dumps(value)


def damage_text(text: str, drawn: random.Random) -> str:
    """A cell, a line or a piece is another, is gone or is doubled."""
    lines = text.splitlines(keepends=True)
    place = drawn.randrange(len(lines))
    choice = drawn.random()
    if choice < 0.5:
        words = lines[place].rstrip("\n")
        for separator in (",", ": ", " "):
            cells = words.split(separator)
            if len(cells) > 1:
                cells[drawn.randrange(len(cells))] = str(drawn.choice((*ODD_VALUES, "9" * 5000, "1e-320", "1;2", '"')))
                lines[place] = separator.join(cells) + "\n"
                break
    elif choice < 0.7:
        del lines[place]
    elif choice < 0.8:
        lines.insert(place, lines[place])
    else:
        lines[place] = drawn.choice(
            ("\n", "&a [*a]\n", "- " * 500 + "1\n", "[" * 5000 + "\n", '{"width": ' + "9" * 5000 + "}\n")
        )
    return "".join(lines)


def damage_bytes(content: bytes, drawn: random.Random) -> bytes:
    """Bytes are cut off, flipped, put in or in another coding."""
    place = drawn.randrange(max(1, len(content)))
    return drawn.choice(
        (
            b"",
            content[:place],
            content[:place] + bytes([drawn.randrange(256)]) + content[place + 1 :],
            content[:place] + b"\x00" + content[place:],
            b"\xef\xbb\xbf" + content,
            content.decode("utf-8", "replace").encode("utf-16"),
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b"9" * 5000,
            b"\x89PNG\r\n\x1a\n" + content,
        )
    )


def place_of_no_file(path: Path, drawn: random.Random) -> None:
    """A folder, a pipe, a device or nothing stands where the file should be."""
    choice = drawn.randrange(4)
    if choice == 0:
        path.mkdir()
    elif choice == 1:
        os.mkfifo(path)
    elif choice == 2:
        path.symlink_to("/dev/zero")


def damaged_inputs(kind: Kind, count: int, seed: int, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """What was done to each input, and the arguments of the command that reads it."""
    drawn = random.Random(f"{kind.name} {seed}")
    is_json = kind.content.lstrip().startswith("{") and kind.name != "request log"
    for number in range(count):
        place = folder / f"{number:04d}"
        place.mkdir()
        for name, text in kind.beside.items():
            (place / name).write_text(text, encoding="utf-8")
        choice = drawn.random()
        damaged = damage_json(kind.content, drawn) if is_json else damage_text(kind.content, drawn)
        if kind.file is None:
            if choice > 0.8:
                damaged = damage_bytes(kind.content.encode(), drawn).decode("utf-8", "replace").replace("\x00", "")
            yield damaged[:200], kind.command(place, damaged)
            continue
        file = place / kind.file
        if choice < 0.05:
            place_of_no_file(file, drawn)
        elif choice < 0.25:
            file.write_bytes(damage_bytes(kind.content.encode(), drawn))
        else:
            file.write_text(damaged, encoding="utf-8", errors="surrogatepass")
        yield str(file), kind.command(place, "")


# -- running -----------------------------------------------------------------------------------------------------------


class TookTooLong(BaseException):
    """Not caught by anything that a command catches."""


def run_command(arguments: list[str]) -> tuple[int, str]:
    """Exit status and what was printed; -1 for a command that was still running after `LIMIT_S`."""
    from typer.testing import CliRunner

    from vitgraph.cli import app

    def stop(*_: object) -> None:
        raise TookTooLong

    before = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.alarm(10 * LIMIT_S)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            result = CliRunner().invoke(app, arguments)
    except TookTooLong:
        return -1, f"still running after {LIMIT_S} s"
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
    text = result.output + errors.getvalue()
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, f"{text}\n{type(result.exception).__name__}: {result.exception}"
    return result.exit_code, text


def wrong_end(status: int, text: str) -> str | None:
    """Why an end is not what a user should see, or None."""
    if status not in RIGHT_ENDS:
        return f"exit status {status}: {text.strip()[-600:]}"
    if "Traceback" in text or "unexpected " in text.partition("error: ")[2][:12]:
        return text.strip()[-600:]
    if status and "error" not in text.lower():
        return f"exit status {status} without a reason: {text.strip()[-300:]}"
    return "a terminal escape reaches the terminal" if "\x1b[31m" in text else None


def run_kind(kind: Kind, count: int, seed: int) -> tuple[Counter[int], list[str]]:
    """Exit statuses of the damaged inputs of a kind, and what was wrong with any."""
    ends: Counter[int] = Counter()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for what, arguments in damaged_inputs(kind, count, seed, Path(folder)):
            status, text = run_command(arguments)
            ends[status] += 1
            reason = wrong_end(status, text)
            if reason is not None:
                content = Path(what).read_bytes()[:2000] if len(what) < 200 and Path(what).is_file() else what
                wrong.append(f"{kind.name}: {reason}\n    of {content!r}")
    return ends, wrong


def bound_memory() -> None:
    """A reader that has no bound of its own must not take the machine with it."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=INPUTS_A_KIND, help="damaged inputs of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", action="append", help="only this kind; may be repeated")
    parser.add_argument("--configs", action="store_true", help="the config.json of every row instead")
    options = parser.parse_args()
    bound_memory()

    def row(kind: Kind) -> tuple[Sequence[object], list[str]]:
        ends, wrong = run_kind(kind, options.inputs, options.seed)
        refused = sum(count for status, count in ends.items() if status)
        return (kind.name, options.inputs, ends[0], refused - len(wrong)), wrong

    wanted = (
        kind for kind in (configs() if options.configs else kinds()) if kind.name in (options.kind or [kind.name])
    )
    return print_table("input | damaged | taken | refused", map(row, wanted))


if __name__ == "__main__":
    sys.exit(main())
