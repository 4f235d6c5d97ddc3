"""`vitgraph bench --config`: what a file may hold, that flags win over it, and that every shipped file runs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image
from rows_of_a_kind import each_row
from typer.testing import CliRunner

from vitgraph.cli import app
from vitgraph.models.registry import ROWS

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = [
    *(pytest.param(path, id=path.name) for path in sorted(CONFIGS.glob("*.yaml"))),
    *each_row(lambda row: CONFIGS / "rows" / f"{row.name}.yaml"),
]
ANY_BACKEND = ("--mm-encoder-attn-backend", "auto", "--load-format", "dummy")
"""The files name backends of a GPU and weights of the hub, which a dry run refuses where there are none."""
NINE = [512, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4864]


def dry_run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["bench", *arguments, "--dry-run", "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments, "--dry-run"])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: qwen3-vl-debug\n"
        "load-format: dummy\n"
        "device: cpu\n"
        "num_prompts: 6\n"
        "num-warmups: 2\n"
        "seed: 3\n"
        "token_budgets: [64, 128, 192]\n"
        "mm_processor_kwargs:\n  max_pixels: 160000\n"
        "single_slot_tier: true\n"
        "compilation_config:\n  encoder_cudagraph_max_vision_items_per_batch: 4\n"
    )
    return path


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    buffer = io.BytesIO()
    Image.new("RGB", (640, 480)).save(buffer, "PNG")
    path = tmp_path_factory.mktemp("arena") / "part.parquet"
    pq.write_table(pa.table({"images": [[{"bytes": buffer.getvalue(), "path": None}]] * 20}), path)
    return path


def test_every_option_of_the_file_reaches_the_settings(config: Path) -> None:
    settings = dry_run("--config", str(config))["settings"]
    assert settings["model"]["model"] == "qwen3-vl-debug"
    assert settings["model"]["load_format"] == "dummy"
    assert settings["model"]["seed"] == settings["workload"]["seed"] == 3
    assert settings["model"]["mm_processor_kwargs"] == {"max_pixels": 160000}
    assert (settings["workload"]["num_prompts"], settings["workload"]["num_warmups"]) == (6, 2)
    assert settings["graph"]["token_budgets"] == [64, 128, 192]
    assert settings["graph"]["max_vision_items_per_batch"] == 4
    assert settings["graph"]["slot_tiers"] is False


def test_a_flag_wins_over_the_file_also_where_it_gives_the_default(config: Path) -> None:
    given = ("--seed", "0", "--num-prompts", "4", "--token-budgets", "128,256")
    settings = dry_run("--config", str(config), *given)["settings"]
    assert settings["model"]["seed"] == 0
    assert settings["workload"]["num_prompts"] == 4
    assert settings["graph"]["token_budgets"] == [128, 256]
    assert settings["workload"]["num_warmups"] == 2


def test_budgets_in_a_compilation_config_flag_win_over_the_files_budgets(config: Path) -> None:
    given = '{"encoder_cudagraph_token_budgets": [256, 512]}'
    settings = dry_run("--config", str(config), "--compilation-config", given)["settings"]
    assert settings["graph"]["token_budgets"] == [256, 512]


def test_the_file_may_ask_for_a_dry_run_as_json(config: Path) -> None:
    config.write_text(config.read_text() + "dry_run: true\njson: true\n")
    result = CliRunner().invoke(app, ["bench", "--config", str(config)])
    assert json.loads(result.stdout)["workload"]["requests"] == 6


def test_a_key_without_a_value_changes_nothing(config: Path) -> None:
    config.write_text(config.read_text() + "max_frames_per_batch:\n")
    assert dry_run("--config", str(config))["settings"]["graph"]["max_frames_per_batch"] is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tokenbudgets: [64]", "unknown key 'tokenbudgets'; did you mean token_budgets?"),
        ("zzz: 1", "unknown key 'zzz'; known: "),
        ("config: other.yaml", "unknown key 'config'"),
        ("num_prompts: many", "num_prompts is 'many'; --num-prompts takes an integer"),
        ("num_prompts: 1.5", "num_prompts is 1.5; --num-prompts takes an integer"),
        ("num_prompts: true", "num_prompts is True; --num-prompts takes an integer"),
        ("no_stream: 1", "no_stream is 1; --no-stream takes true or false"),
        ("hf_split: 7", "hf_split is 7; --hf-split takes text"),
        ("token_budgets: [64, big]", "--token-budgets takes a list of integers"),
        ("mm_processor_kwargs: [1]", "--mm-processor-kwargs takes a mapping or its JSON text"),
        ("output_dir: 3", "--output-dir takes a path"),
        ("seed: 1\nseed: 2", "run.yaml:2: 'seed' was set in line 1"),
        ("num-prompts: 1\nnum_prompts: 2", "'num_prompts' sets --num-prompts a second time"),
        ("compile: true\ncompile-blocks: true", "unknown key 'compile-blocks'"),
        ("- seed", "holds a list; it must be a mapping"),
        ("", "holds nothing; it must be a mapping"),
        ("seed: [", "is not valid YAML"),
    ],
)
def test_what_a_file_must_not_hold(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert expected in refusal("--config", str(path))


def test_a_missing_file_names_the_near_one(config: Path) -> None:
    assert "rum.yaml: No such file or directory; near: run.yaml" in refusal(
        "--config", str(config.with_name("rum.yaml"))
    )


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refusal("--config", str(path))


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED)
def test_every_shipped_file_plans_its_run(path: Path, parquet: Path) -> None:
    settings = yaml.safe_load(path.read_text())
    # The hub's images are not here: a local copy stands in for them, and every other setting is as in the file.
    is_hub = settings["dataset_name"] == "hf"
    local = ["--dataset-path", str(parquet), "--num-prompts", "10", "--disable-shuffle"] if is_hub else []
    plan = dry_run("--config", str(path), *local, *ANY_BACKEND)
    assert plan["expected"]["hits"] > 0
    assert plan["resolved"]["config_source"] == "preset"
    assert plan["settings"]["workload"]["num_warmups"] == settings["num_warmups"]
    assert plan["settings"]["workload"]["num_prompts"] == (10 if local else settings["num_prompts"])


def test_every_row_of_the_registry_has_a_file() -> None:
    files = {path.stem: yaml.safe_load(path.read_text()) for path in (CONFIGS / "rows").glob("*.yaml")}
    assert {name: file["model"] for name, file in files.items()} == {row.name: row.full_preset for row in ROWS}
    assert all(file["load_format"] == "dummy" and file["dataset_path"] == "mixed-chat" for file in files.values())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER"])
def test_the_published_scenarios_are_there_for_each_backend(backend: str, parquet: Path) -> None:
    arena, twin, random = (
        dry_run("--config", str(CONFIGS / f"{name}-{backend.lower()}.yaml"), *extra, *ANY_BACKEND)
        for name, extra in (
            ("qwen3_vl_30b-vision_arena", ("--dataset-path", str(parquet), "--disable-shuffle")),
            ("qwen3_vl_30b-mixed_chat", ()),
            ("qwen3_vl_32b-random_mm", ()),
        )
    )
    for file in CONFIGS.glob(f"*-{backend.lower()}.yaml"):
        assert yaml.safe_load(file.read_text())["mm_encoder_attn_backend"] == backend
    for plan in (arena, twin, random):
        assert plan["resolved"]["token_budgets"]["default"] == NINE
        assert plan["resolved"]["max_vision_items_per_batch"] == 8
        assert plan["settings"]["model"]["seed"] == 42
    for plan in (arena, twin):
        assert plan["workload"]["requests"] == 3000
        assert plan["settings"]["graph"]["max_model_len"] == 32768
    # 20 images of 100 tokens, at most 8 a replay.
    assert (random["expected"]["items"], random["expected"]["replays"]) == (20000, 3000)
    assert random["settings"]["graph"]["max_model_len"] == 8192


def test_a_pair_is_a_list_of_two_in_a_file(tmp_path: Path) -> None:
    path, results = tmp_path / "export.yaml", Path(__file__).parents[2] / "results" / "bench"
    for given, expected in (
        ("only-one", "--compare takes a list of 2"),
        (f"{results / 'row_glm4v'}, {results / 'row_gemma3'}", "are not comparable"),
    ):
        path.write_text(f"compare: [{given}]")
        result = CliRunner().invoke(app, ["export", "--config", str(path)])
        assert (result.exit_code, expected in result.stderr) == (2, True)
