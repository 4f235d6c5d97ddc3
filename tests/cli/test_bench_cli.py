"""`vitgraph bench` as a user runs it: tables, records, exit statuses and the texts of errors."""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from saved_run_folders import read_bench
from typer.testing import CliRunner

from vitgraph.cli import app
from vitgraph.graphs import manager
from vitgraph.measure.series import Series
from vitgraph.records.record import BenchRecord
from vitgraph.records.sample_table import read_samples
from vitgraph.records.store import read_record

TINY = [
    "bench", "--model", "qwen3-vl-debug", "--load-format", "dummy", "--device", "cpu", "--num-prompts", "6",
    "--num-warmups", "2", "--rounds", "1", "--mm-processor-kwargs", '{"min_pixels": 1024, "max_pixels": 40000}',
    "--token-budgets", "16,32,48",
]  # fmt: skip


def run(*arguments: str, tiny: bool = True) -> Any:
    return CliRunner().invoke(app, [*(TINY if tiny else ["bench"]), *arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.usefixtures("drawn")
def test_a_run_leaves_a_whole_record_and_prints_the_table(folder: Path) -> None:
    result = run("--output-dir", str(folder))
    assert result.exit_code == 0, result.output
    assert "TORCH_SDPA" in result.stdout
    assert "no speed-up is claimed" in " ".join(result.stdout.split())
    assert f"its page, tables and plots: vitgraph export {folder}" in result.stdout
    data = json.loads((folder / "run.json").read_text())
    assert (data["kind"], data["format"]) == ("bench", 2)
    for mode in ("eager", "graph"):
        assert {"mean_ms", "p50_ms", "p99_ms", "requests"} <= set(data["result"]["latency"][mode])
        assert data["result"]["latency"][mode]["requests"] == 6
    graph = data["result"]["graph"]
    assert graph["hits"] + graph["misses"] == graph["items"] == 6
    assert {"hit_rate", "waste", "replays"} <= set(graph)
    assert graph["mode"] == "cpu-replay"
    assert graph["launch_gap"] is None
    assert data["result"]["comparison"]["verdict"] == "invalid"
    assert data["result"]["correctness"]["status"] == "ok"
    assert data["environment"]["encoder"]["attn_backend"] == "TORCH_SDPA"
    with (folder / "samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["series"] for row in rows} == {"eager", "graph", "eager_repeat"}
    for name in ("summary.csv", "per_budget.csv", "plots/latency_by_tokens.png", "plots/budgets.svg"):
        assert (folder / name).stat().st_size > 0
    # The command that it names makes the page.
    (command,) = (line.partition(": ")[2] for line in result.stdout.splitlines() if line.startswith("its page"))
    assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0
    assert (folder / "export" / "report.html").stat().st_size > 0


@pytest.mark.parametrize("asked", [["-cc", '{"cudagraph_mm_encoder": false}'], ["--enforce-eager"]])
def test_graphs_that_are_switched_off_leave_eager_alone_and_it_says_so(folder: Path, asked: list[str]) -> None:
    result = run("--output-dir", str(folder), *asked)
    assert result.exit_code == 0, result.output
    assert "graphs are switched off" in " ".join(result.stdout.split())
    record = read_record(folder)
    assert isinstance(record, BenchRecord)
    assert (record.status, set(record.result.latency)) == ("complete", {"eager"})
    assert (record.result.latency["eager"].requests, record.result.graph.captured) == (6, ())
    assert record.result.comparison.pairs == ()
    assert "0" in next(line for line in run(*asked, "--dry-run").stdout.splitlines() if "Graphs to capture" in line)


@pytest.mark.parametrize("other", [["--fail-on-slower"], ["--compile-rows"], ["--baseline", "monolithic"]])
def test_eager_alone_is_refused_beside_what_is_about_graphs(other: list[str]) -> None:
    result = run("--enforce-eager", *other)
    assert result.exit_code == 2
    assert f"{' '.join(other)} is about graphs" in result.stderr


def test_commands_about_graphs_refuse_to_switch_them_off(folder: Path) -> None:
    words = ["compare-backends", *TINY[1:], "-cc", '{"cudagraph_mm_encoder": false}', "--output-dir", str(folder)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "--compilation-config asks for enforce_eager, which this command does not take" in result.stderr
    assert not folder.exists()


def test_json_prints_one_object_and_nothing_else(folder: Path) -> None:
    result = run("--output-dir", str(folder), "--json", "--quiet")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["result"]["graph"]["items"] == 6


def test_modes_alternate_which_goes_first(folder: Path) -> None:
    run("--output-dir", str(folder), "--rounds", "2")
    samples = read_samples(folder / "samples.csv").calls
    first = samples[samples["series"].isin(["eager", "graph"]) & (samples["position"] == 0)]
    assert set(first[(first["round"] + first["call"]) % 2 == 0]["series"]) == {"eager"}
    assert ((samples["series"] == "graph") & (samples["position"] < 2)).any()


def test_items_one_by_one_are_a_series_of_their_own(folder: Path) -> None:
    result = run("--output-dir", str(folder), "--requests-per-call", "3", "--baseline", "itemwise", "--quiet")
    assert result.exit_code == 0, result.output
    assert "item by item" in result.stdout or "itemwise" in (folder / "run.json").read_text()
    with (folder / "samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    by_series = Counter(row["series"] for row in rows)
    assert by_series == {"eager": 2, "graph": 2, "itemwise": 2, "eager_repeat": 2}
    assert {row["requests"] for row in rows} == {"0 1 2", "3 4 5"}
    record = read_record(folder)
    assert isinstance(record, BenchRecord)
    assert {(entry.requests, entry.calls) for entry in record.result.latency.values()} == {(6, 2)}
    assert set(record.result.latency) == {"eager", "graph", "itemwise"}


def test_a_record_is_not_replaced_unless_asked(folder: Path) -> None:
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    again = run("--output-dir", str(folder))
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr
    assert run("--output-dir", str(folder), "--overwrite").exit_code == 0


@pytest.mark.parametrize(("budgets", "is_told"), [("512,1024", True), ("256,512", False)])
def test_budgets_far_above_the_items_are_told_before_a_run(budgets: str, is_told: bool) -> None:
    arguments = ["--model", "gemma-3-4b", "--load-format", "dummy", "--num-prompts", "6", "--dry-run"]
    result = run(*arguments, "--token-budgets", budgets, tiny=False)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    told = (
        "note: token budget 512 will be used most, with 256 of its rows filled: 50% is padding, so its graphs compute "
    )
    told += "2.0 times the rows of eager and may well be slower. Give smaller --token-budgets, nearer to the items' "
    assert (told in text) == is_told
    assert ("`vitgraph tune-budgets`" in text) == is_told


@pytest.mark.slow
def test_budgets_far_above_the_items_are_told_by_the_run_too(folder: Path) -> None:
    result = run("--token-budgets", "2048", "--max-vision-items-per-batch", "1", "--output-dir", str(folder))
    assert result.exit_code == 0, result.output
    assert "note: token budget 2048 will be used most, with " in " ".join(result.stderr.split())


def test_a_dry_run_shows_the_plan_and_measures_nothing(folder: Path) -> None:
    result = run("--dry-run", "--output-dir", str(folder))
    assert result.exit_code == 0
    assert "16, 32, 48" in result.stdout
    assert "\nExpected\nItems" in result.stdout
    assert not folder.exists()


def test_images_and_videos_in_one_call(folder: Path) -> None:
    buckets = '{"(64,96,1)": 0.5, "(64,96,6)": 0.5}'
    result = run(
        "--dataset-name", "random-mm", "--random-mm-bucket-config", buckets, "--random-mm-base-items-per-request", "4",
        "--random-mm-limit-mm-per-prompt", '{"image": 4, "video": 4}', "--mm-processor-kwargs", '{"min_pixels": 1024}',
        "--output-dir", str(folder), "--json", "--quiet",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["workload"]["videos"] > 0
    assert record["workload"]["images"] > 0
    assert record["result"]["graph"]["misses"] == 0


def test_pruned_videos_run_eagerly_with_a_word_about_it(folder: Path) -> None:
    result = run(
        "--dataset-name", "random-mm", "--random-mm-bucket-config", '{"(64,96,1)": 0.5, "(64,96,6)": 0.5}',
        "--random-mm-base-items-per-request", "2", "--random-mm-limit-mm-per-prompt", '{"image": 2, "video": 2}',
        "--video-pruning-rate", "0.5", "--output-dir", str(folder), "--json", "--quiet",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "pruning" in result.stderr
    graph = json.loads(result.stdout)["result"]["graph"]
    assert set(graph["misses_by_reason"]) == {"video_disabled"}
    assert graph["hits"] > 0


def test_graph_mode_that_replays_nothing_is_a_failure_with_a_record(folder: Path) -> None:
    result = run("--packing", "exact", "--token-budgets", "67,211", "--output-dir", str(folder), "--quiet")
    assert result.exit_code == 3
    assert "replayed nothing" in result.stderr
    assert json.loads((folder / "run.json").read_text())["result"]["graph"]["misses_by_reason"] == {"not_exact": 6}


def test_budgets_below_every_item_are_refused_before_anything_runs(folder: Path) -> None:
    result = run("--token-budgets", "16,32", "--output-dir", str(folder))
    assert result.exit_code == 2
    assert "largest token budget is 32" in result.stderr
    assert not (folder / "samples.csv").exists()


def test_the_time_of_a_graph_call_has_the_packing_of_its_items_in_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_pack, real_time, running, packed = manager.pack_items, Series.time, [], []

    def pack(*arguments: Any) -> Any:
        packed.append(running[-1] if running else None)
        return real_pack(*arguments)

    def time_series(self: Series, *arguments: Any) -> Any:
        running.append(self.name)
        try:
            return real_time(self, *arguments)
        finally:
            running.pop()

    monkeypatch.setattr(manager, "pack_items", pack)
    monkeypatch.setattr(Series, "time", time_series)
    result = run("--output-dir", str(folder), "--quiet")
    assert result.exit_code == 0, result.stderr
    # Outputs of the warm-ups' sizes are compared before anything is timed; every other size is packed in a timed call.
    assert set(packed) == {None, "graph"}
    assert packed.count("graph") >= 2


def test_a_stop_by_the_user_keeps_what_was_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Series.batches
    managers = []

    def stop_at_the_fourth(self: Series, call: Any) -> Any:
        if call.index == 3 and self.manager is not None:
            managers.append(self.manager)
            raise KeyboardInterrupt
        return real(self, call)

    monkeypatch.setattr(Series, "batches", stop_at_the_fourth)
    result = run("--output-dir", str(folder))
    assert result.exit_code == 130
    record = read_bench(folder)
    assert record.status == "interrupted"
    assert record.result.latency["graph"].calls == 3
    assert (folder / "summary.csv").exists()
    assert managers[0].graphs == {}


def test_a_full_disk_ends_with_what_is_lost_and_what_is_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitgraph.records.sample_table import SampleWriter

    real = SampleWriter._append
    written = []

    def fill_up(self: SampleWriter, cells: Any) -> None:
        written.append(cells)
        if len(written) > 6:
            raise OSError(28, "No space left on device")
        real(self, cells)

    monkeypatch.setattr(SampleWriter, "_append", fill_up)
    result = run("--output-dir", str(folder))
    assert result.exit_code == 1
    assert "No space left" in result.stderr
    assert "samples.csv" in result.stderr
    assert read_bench(folder).status == "error"


def test_wrong_outputs_are_never_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitgraph.graphs.manager import EncoderCudaGraphManager

    real = EncoderCudaGraphManager.execute
    monkeypatch.setattr(EncoderCudaGraphManager, "execute", lambda self, call: [x * 1.01 for x in real(self, call)])
    result = run("--output-dir", str(folder))
    assert result.exit_code == 4
    assert "nothing was timed" in result.stderr
    result = read_bench(folder).result
    assert result.correctness is not None and result.correctness.status == "incorrect"
    assert result.latency == {}


def test_local_parquet_images_go_through_the_real_processor(tmp_path: Path, folder: Path) -> None:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    def encoded(width: int, height: int) -> bytes:
        buffer = io.BytesIO()
        Image.effect_noise((width, height), 50).convert("RGB").save(buffer, "PNG")
        return buffer.getvalue()

    images = [[{"bytes": encoded(200 + 20 * i, 180), "path": None}] for i in range(8)]
    images[2] = [{"bytes": b"not an image", "path": None}]
    conversation = [[[{"role": "user", "content": "What is this?"}]]] * 8
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.table({"images": images, "conversation": conversation}), data / "part.parquet")
    result = run(
        "--dataset-name", "hf", "--dataset-path", str(data), "--num-prompts", "5", "--output-dir", str(folder),
        "--json", "--quiet",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["result"]["latency"]["graph"]["requests"] == 5
    assert len(record["workload"]["skipped"]) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "gpt-17"], "gpt-17"),
        (["--device", "cuda:7"], "cuda:7"),
        (["--dtype", "int3"], "bfloat16"),
        (["--mm-encoder-attn-backend", "FLASHY"], "TORCH_SDPA"),
        (["--packing", "tetris"], "greedy-defer"),
        (["--rounds", "0"], "--rounds is 0"),
        (
            ["--baseline", "hf", "--compile"],
            "but --compile compiles the blocks that it runs too",
        ),
        (["--token-budgets", "64,big"], "64,big"),
        (["--token-budgets", "64", "--max-vision-items-per-batch", "256"], "256"),
        (["--compilation-config", "{"], "not valid JSON"),
        (["--compilation-config", '{"encoder_cudagraph_token_budget": [1]}'], "encoder_cudagraph_token_budgets"),
        (["--video-pruning-rate", "2"], "--video-pruning-rate is 2"),
        (["--mm-processor-kwargs", '{"colour": 1}'], "colour"),
        (["--dataset-path", "no-such-trace.csv"], "no-such-trace.csv"),
    ],
)
def test_bad_options_end_with_2_and_a_way_out(arguments: list[str], named: str, folder: Path) -> None:
    result = run(*arguments, "--output-dir", str(folder))
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert "Traceback" not in result.stderr


def test_the_published_command_resolves_to_its_settings(folder: Path) -> None:
    config = (
        '{"cudagraph_mm_encoder": true, "encoder_cudagraph_token_budgets": [512, 1024, 1536, 2048, 2560, 3072, 3584, '
        '4096, 4864], "encoder_cudagraph_max_vision_items_per_batch": 8}'
    )
    result = run(
        "--model", "Qwen/Qwen3-VL-32B-Instruct", "--load-format", "dummy", "--dataset-name", "random-mm",
        "--random-mm-base-items-per-request", "20",
        "--random-mm-num-mm-items-range-ratio", "0.0", "--random-mm-bucket-config", '{"(336,336,1)": 1.0}',
        "--num-prompts", "1000", "--num-warmups", "200", "--max-model-len", "8192", "--seed", "42",
        "--compilation-config", config, "--dry-run", "--json", tiny=False,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["resolved"]["token_budgets"]["default"] == [512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4864]
    assert plan["resolved"]["max_vision_items_per_batch"] == 8
    assert (plan["expected"]["hits"], plan["expected"]["replays"]) == (20000, 3000)


def test_an_output_that_is_not_a_number_is_recorded_as_incorrect(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitgraph.graphs.manager import EncoderCudaGraphManager

    real = EncoderCudaGraphManager.execute
    monkeypatch.setattr(
        EncoderCudaGraphManager, "execute", lambda self, call: [x * float("nan") for x in real(self, call)]
    )
    assert run("--output-dir", str(folder)).exit_code == 4
    correctness = read_bench(folder).result.correctness
    assert correctness is not None and correctness.status == "incorrect"
    assert correctness.max_rel_l2 == pytest.approx(float("nan"), nan_ok=True)


@pytest.mark.slow
def test_a_termination_signal_keeps_what_was_measured(folder: Path) -> None:
    command = [sys.executable, "-m", "vitgraph", *TINY, "--num-prompts", "2000", "--output-dir", str(folder), "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    samples = folder / "samples.csv"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and (not samples.exists() or samples.read_text().count("\n") < 8):
        time.sleep(0.1)
    process.terminate()
    assert process.wait(timeout=240) == 130
    record = read_bench(folder)
    assert record.status == "interrupted"
    assert record.result.latency["graph"].calls >= 1


@pytest.mark.slow
def test_a_module_that_reports_leaks_at_the_end_is_not_asked() -> None:
    program = """
import atexit, os, sys, types
from vitgraph import __main__, cli
from vitgraph.commands import process
sys.modules[process.LEAK_REPORTER] = types.ModuleType("reporter")
class Report:
    def __del__(self): os.write(1, b"leaked")
kept = Report()
atexit.register(lambda: print("at exit"))
def app():
    print("a table")
    raise SystemExit(3)
cli.app = app
__main__.main()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (3, "a table\nat exit\n", "")
