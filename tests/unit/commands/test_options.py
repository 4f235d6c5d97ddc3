"""Every option of every command: its page, its way into the spec, what is refused, and vLLM's spellings."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from vitgraph import errors
from vitgraph.cli import app
from vitgraph.commands import process
from vitgraph.commands.options import add_command, as_here, read_spec, specs_of_commands
from vitgraph.commands.process import STOP_SIGNALS
from vitgraph.commands.shell import Shown, reported_errors
from vitgraph.errors import EXIT_STATUSES, UsageError, VitgraphError
from vitgraph.specs.asked import BenchSpec, CompareSpec
from vitgraph.specs.fields import Option, as_options, build, options_of
from vitgraph.specs.parts import GraphSpec, ModelSpec, ParallelSpec, RunSpec, WorkloadSpec
from vitgraph.specs.tools import DoctorSpec
from vitgraph.specs.values import parse_compilation_config, parse_items, parse_token_budgets, parse_tokens

ROOT = Path(__file__).parents[3]
MODEL = ["--model", "qwen3-vl-debug"]
COMMAND = typer.main.get_command(app)
SPECS = specs_of_commands(app)
NEEDED: dict[str, dict[str, list[str]]] = {
    **{
        name: {"model": MODEL}
        for name in ("bench", "recommend", "tune-budgets", "compare-backends", "calibrate", "verify", "plan", "profile")
    },
    "export": {"runs": ["a-run"]},
    "sweep": {"file": ["a.yaml"]},
    "import": {"command": ["vllm serve m/m"]},
    "workload make": {"output": ["--output", "a.csv"]},
    "workload calls": {"model": MODEL, "output": ["--output", "a.csv"], "request_rate": ["--request-rate", "3"]},
    "workload convert": {"source": ["a-folder"], "output": ["--output", "a.csv"]},
}
"""What each command cannot do without, by option."""

SAMPLES: dict[str, Any] = {
    "baseline": "hf", "mm_encoder_tp_mode": "data", "dp_assignment": "cost", "load_format": "dummy",
    "mm_processor_kwargs": '{"max_pixels": 9}', "token_budgets": "64,2k", "max_model_len": "8k", "items": "2*9x8,7x6x5",
    "max_num_batched_tokens": "4k", "random_mm_limit_mm_per_prompt": '{"image": 3}',
    "random_mm_bucket_config": '{"(5,6,1)": 1.0}', "video_pruning_rate": 0.25, "video_fps": 24.0,
    "random_mm_num_mm_items_range_ratio": 0.5, "compare": ("a", "b"),
    "limit_mm_per_prompt": '{"video": 2}', "fields": '{"width": "w"}', "requests_per_call": "1:0.5,2:0.5",
    "search_share": 0.25, "max_slower_share": 0.25, "packing": "exact", "target": "vllm",
}  # fmt: skip
"""A value other than the default, where "x", 7 or 7.5 would be none."""

BESIDE = {
    "monolithic_crops": ["--baseline", "monolithic"],
    "tensor_parallel_size": ["--mm-encoder-tp-mode", "data"],
    "debug_size": ["--all"],
    **{f"export {key}": ["--compare", "a", "b"] for key in ("across", "fail_on_slower", "same_margin")},
}
INSTEAD = {
    **dict.fromkeys((("verify", "all"), ("verify", "debug_size")), "model"),
    **{("export", key): "runs" for key in ("compare", "across", "fail_on_slower", "same_margin")},
    ("workload calls", "requests_per_call"): "request_rate",
}
"""What a command can do without where an option is given."""


def given(key: str, entry: Option) -> tuple[list[str], Any]:
    """Words that give an option a value, and the field's value for them."""
    if entry.is_flag:
        return [entry.names[0]], entry.read(True)
    kinds = {int: 7, float: 7.5, Path: Path("p")}
    value = SAMPLES.get(key, "2%" if entry.metavar == "PERCENT" else kinds.get(entry.kind, "x"))
    value = "auto" if value == entry.default == "dummy" else value
    words = [str(each) for each in value] if isinstance(value, tuple) else [str(value)]
    if entry.is_repeatable:
        value = (value,)
    return [entry.names[0], *words], entry.read(value)


def asked(name: str, *words: str) -> Any:
    command: Any = COMMAND
    for part in name.split():
        command = command.commands[part]
    context = command.make_context(name, list(words))
    return read_spec(SPECS[name], context, context.params)


@pytest.mark.parametrize("command", SPECS)
def test_every_option_reaches_every_field_of_its_spec(command: str) -> None:
    for key, entry in options_of(SPECS[command]).items():
        if not entry.fields or key == "config" or entry.is_argument:
            continue
        words, expected = given(key, entry)
        left_out = {key, INSTEAD.get((command, key))}
        needed = [word for name, each in NEEDED.get(command, {}).items() if name not in left_out for word in each]
        spec = asked(command, *needed, *words, *BESIDE.get(f"{command} {key}", BESIDE.get(key, [])))
        assert expected != entry.default_value, f"{key}: a value that is the default shows nothing"
        for path in entry.fields:
            value: Any = spec
            for name in path:
                value = getattr(value, name)
            assert value == expected, key


def test_a_shell_completes_the_presets() -> None:
    models = [options["model"] for spec in SPECS.values() if "model" in (options := options_of(spec))]
    assert len(models) == 10
    for model in models:
        assert model.completes is not None
        assert "qwen3-vl-debug" in model.completes("qwen3-vl-d")
        assert "gemma3-4b,qwen3-vl-debug" in model.completes("gemma3-4b,qwen3-vl-d")
        assert model.completes("nothing") == []


def test_help_cuts_no_name_and_joins_the_lines_of_a_paragraph() -> None:
    text = CliRunner().invoke(app, ["recommend", "--help"], env={"COLUMNS": "80"}).output
    assert not re.search(r"--\S*…", text) and "compares replay with eager. Without one: predicts" in text


def errors_below(kind: type[VitgraphError]) -> set[type[VitgraphError]]:
    return {kind}.union(*(errors_below(each) for each in kind.__subclasses__()))


def test_every_exit_status_is_in_the_one_table_and_on_its_page() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8").partition("## Exit statuses")[2]
    named = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_") and isinstance(value, int)}
    assert set(named.values()) == set(EXIT_STATUSES)
    assert {kind.exit_status for kind in errors_below(VitgraphError)} <= set(EXIT_STATUSES)
    for status, meaning in EXIT_STATUSES.items():
        assert f"| {status} | {meaning} |" in page


def test_every_command_of_settings_takes_a_config_file() -> None:
    without = {name for name, spec in SPECS.items() if "config" not in options_of(spec)}
    assert without == {"models", "doctor", "import", "sweep"}


def test_a_spec_is_said_as_options_and_made_of_them_again() -> None:
    bench = BenchSpec(
        ModelSpec("qwen3-vl-debug", mm_processor_kwargs={"max_pixels": 9}),
        GraphSpec(token_budgets=(64,), slot_tiers=False),
        RunSpec(rounds=3, output_dir=Path("x")),
        WorkloadSpec("random-mm", random_mm_bucket_config={(5, 6, 1): 1.0}),
        ParallelSpec(ranks=2, tp_mode="data"),
    )
    spec = CompareSpec(bench, ("TORCH_SDPA",))
    options = json.loads(json.dumps(as_options(spec)))
    entries = options_of(CompareSpec)
    assert build(CompareSpec, {name: entries[name].read(value) for name, value in options.items()}).as_dict() == (
        spec.as_dict()
    )


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--token-budgets", "64,9223372036854775807"], "a budget is from 1 to 16,777,216"),
        (["--token-budgets", "0"], "a budget is from 1"),
        (["--seed", str(2**63)], "--seed is 9223372036854775808; it must be at most"),
        (["--seed", "-1"], "--seed is -1"),
        (["--video-fps", "nan"], "--video-fps is nan; it must be a number of frames a second"),
        (["--video-fps", "1e-320"], "--video-fps is"),
        (["--video-fps", "-3"], "--video-fps is -3.0"),
        (["--mm-processor-kwargs", '{"max_pixels": -5}'], "max_pixels is -5; it must be a finite number, at least 0"),
        (["--mm-processor-kwargs", "[" * 100000], "nested too deeply"),
        (["--compilation-config", '{"foo": 1}'], "unknown field 'foo'"),
        (["--compilation-config", '{"encoder_cudagraph_tokn_budgets": [1]}'], "did you mean encoder_cudagraph_token_b"),
        (["--rank-timeout", "inf"], "--rank-timeout is inf"),
        (["--max-vision-items-per-batch", str(10**18)], "it must be at most 1,048,576"),
        (["--model", "Qwen2.5-VL-7B"], "did you mean qwen2.5-vl-7b"),
        (["--dtype", "float8"], "--dtype is 'float8'"),
        (["--device", "gpu"], "--device is 'gpu'"),
        (["--mm-encoder-attn-backend", "FLASH_ATN"], "'FLASH_ATN'"),
        (["--load-format", "dumy"], "--load-format is 'dumy'"),
        (["--output-dir", "/proc/nope/x"], "cannot write into /proc/nope/x"),
    ],
)
@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry", "run"])
def test_a_dry_run_refuses_what_a_run_refuses(
    words: list[str], named: str, dry: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = ["bench", *MODEL, "--load-format", "dummy", "--num-prompts", "2", "--device", "cpu"]
    result = CliRunner().invoke(app, [*base, *words, *dry])
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_count_has_an_upper_bound() -> None:
    entries = {entry.names[0]: entry for spec in SPECS.values() for entry in options_of(spec).values()}
    for name, entry in entries.items():
        if entry.kind is int and name != "--seed":
            assert entry.rule is not None, name
            broken = entry.rule(2**31 if name != "--max-pixels-per-item" else 2**62)
            assert broken is not None and "it must be at most" in broken, name
    with pytest.raises(UsageError, match=r"--num-warmups is 2147483648; it must be at most 100,000; give a smaller"):
        WorkloadSpec(num_warmups=2**31)


@pytest.mark.parametrize("command", ["verify", "calibrate", "profile", "recommend", "tune-budgets", "compare-backends"])
@pytest.mark.parametrize("words", [["--dtype", "float8"], ["--device", "gpu"], ["--load-format", "dumy"]])
def test_every_measuring_command_refuses_dry_too(
    command: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = [CliRunner().invoke(app, [command, *MODEL, *words, *dry]) for dry in ([], ["--dry-run"])]
    assert {result.exit_code for result in found} == {2}, found[1].output
    assert found[0].stderr == found[1].stderr
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_a_folder_with_a_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    words = ["bench", *MODEL, "--load-format", "dummy", "--num-prompts", "2", "--device", "cpu", "--dry-run"]
    result = CliRunner().invoke(app, [*words, "--output-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "--overwrite" in result.stderr


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("2*9x8", [(9, 8, 1)] * 2), ("640X480x8, 3x4", [(640, 480, 8), (3, 4, 1)]), ("336x336", [(336, 336, 1)])],
)
def test_items_are_read_alike_by_every_command(text: str, sizes: list[tuple[int, int, int]]) -> None:
    assert list(parse_items(text)) == sizes
    for command in ("plan", "profile"):
        assert list(asked(command, *MODEL, "--items", text).items) == sizes


@pytest.mark.parametrize("text", ["512,1024", "[512, 1024]", "512 1024", [512, 1024], "512,1K"])
def test_budgets_are_read_in_every_spelling(text: Any) -> None:
    assert parse_token_budgets(text) == (512, 1024)


@pytest.mark.parametrize("text", ["", "8q", "-8", "8kk", "1e9", "9" * 60])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be a number of tokens"):
        parse_tokens(text)


# -- the habits of vLLM ------------------------------------------------------------------------------------------------


def test_random_mm_options_ask_for_random_mm() -> None:
    assert asked("bench", *MODEL, "--random-mm-base-items-per-request", "2").workload.dataset_name == "random-mm"
    assert asked("bench", *MODEL).workload.dataset_path == "mixed-chat"
    named = asked("bench", *MODEL, "--dataset-name", "trace", "--random-mm-base-items-per-request", "2")
    assert named.workload.dataset_name == "trace"


def test_vllms_spellings_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    spec = asked(
        "bench", *MODEL, "--num_prompts", "3", "-tp", "2", "--mm-encoder-tp-mode=data", "--max_model_len", "8k",
        "-cc.encoder_cudagraph_token_budgets+", "512", "--compilation-config.encoder_cudagraph_token_budgets+=1024",
        "-cc.cudagraph_mm_encoder=True", "--random-input-len", "10", "--trust-remote-code", "--no-enable-lora",
        "--lora-target-modules", "a", "b", "--gpu-memory-utilization=0.5", "--hf-overrides={}", "--seed", "4",
    )  # fmt: skip
    assert (spec.workload.num_prompts, spec.parallel.ranks, spec.graph.max_model_len) == (3, 2, 8000)
    assert (spec.graph.token_budgets, spec.model.seed) == ((512, 1024), 4)
    ignored = capsys.readouterr().err
    for name in ("--random-input-len", "--trust-remote-code", "--no-enable-lora", "--lora-target-modules"):
        assert name in ignored.partition("shape no encoder")[0]
    assert "--hf-overrides is not read, though it may change" in ignored


def test_what_nobody_has_stays_an_error() -> None:
    assert as_here(["--no-such-thing", "1"], {"--compilation-config": False}) == (["--no-such-thing", "1"], [])


def test_fields_of_the_language_model_are_named_and_ignored() -> None:
    with pytest.warns(match="level is about the language model"):
        assert parse_compilation_config('{"level": 3, "encoder_cudagraph_max_frames_per_batch": 4}') == {
            "encoder_cudagraph_max_frames_per_batch": 4
        }


# -- the shell ---------------------------------------------------------------------------------------------------------


def broken(spec: DoctorSpec) -> Shown:
    """Breaks."""
    raise KeyError("a hole")


def test_what_nobody_foresaw_is_one_line_and_a_traceback_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VITGRAPH_DEBUG", raising=False)
    own = typer.Typer()
    add_command(own, "break", broken)
    result = CliRunner().invoke(own, [])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: unexpected KeyError in test_options.py")
    assert len(result.stderr.strip().splitlines()) == 1
    assert isinstance(CliRunner().invoke(own, ["--debug"]).exception, KeyError)


@pytest.fixture
def hears_stops() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    hook = sys.unraisablehook
    # A program that a shell starts behind another one is born deaf to it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    sys.unraisablehook = hook
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_that_python_swallows_is_not_lost(
    number: int, hears_stops: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_late(self: threading.Thread) -> None:
        # As on a busy machine: what sends it again is there before who began it has come back.
        start(self)
        time.sleep(5 * process.AGAIN_S)

    monkeypatch.setattr(threading.Thread, "start", start_late)

    class Stopped:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)

    with pytest.raises(typer.Exit) as ended, reported_errors():
        Stopped()
        time.sleep(5.0)
        pytest.fail("the run went on")
    assert ended.value.exit_code == 130


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_that_a_library_makes_an_error_of_is_a_stop(number: int, hears_stops: None) -> None:
    """As code in C does that was calling Python."""
    with pytest.raises(typer.Exit) as ended, reported_errors():
        try:
            os.kill(os.getpid(), number)
            time.sleep(5.0)
        except KeyboardInterrupt:
            raise ValueError("Invalid bounding box") from None
    assert ended.value.exit_code == 130


@pytest.mark.slow
def test_a_terminal_of_ascii_gets_a_whole_plan() -> None:
    words = ["plan", *MODEL, "--items", "336x336"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    program = [sys.executable, "-m", "vitgraph", *words]
    done = subprocess.run(program, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
