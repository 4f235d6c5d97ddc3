"""vLLM's capture rules: what a list must keep, family by family, and that nothing that is proposed breaks one."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from make_reference import rules_table
from synthetic import synthetic_profile, with_facts

from vitgraph.commands.import_settings import import_settings
from vitgraph.errors import InputError
from vitgraph.measure.setup import engine_notes
from vitgraph.models.registry import all_presets, resolve_model
from vitgraph.planning.budgets import BudgetSettings
from vitgraph.predict.cost_model import CostModel
from vitgraph.predict.engine_rules import FAMILIES, WITHOUT_GRAPHS, EngineRules, EngineTower, engine_tower
from vitgraph.predict.targets import TARGETS, VLLM, TargetCost, encoder_facts
from vitgraph.predict.workload_cost import Traffic
from vitgraph.specs.parts import GraphSpec, WorkloadSpec
from vitgraph.tuning.objective import Limits, Objective
from vitgraph.tuning.search import Search
from vitgraph.workloads.registry import build_workload
from vitgraph.workloads.trace import SHIPPED_TRACES

SOURCES = {model: resolve_model(model) for model in sorted(all_presets())}
DOCS = Path(__file__).parents[3] / "docs" / "choose-budgets.md"


def names(model: str, budgets: tuple[int, ...], items: int, frames: int = 0, *, has_videos: bool = False) -> list[str]:
    rules = EngineRules(engine_tower(resolve_model(model)), has_videos)
    return list(rules.broken(BudgetSettings(budgets, items, frames, "greedy-defer")))


@pytest.mark.parametrize("model", ["qwen2-vl-7b", "qwen2.5-vl-7b", "qwen3-vl-30b-a3b", "qwen3.5-9b", "glm-4.1v-9b"])
def test_a_row_of_the_capture_batch_fits_the_rotary_table(model: str) -> None:
    assert names(model, (512, 4096), 1) == []
    assert names(model, (512, 4097), 1) == ["rotary-table"]
    assert names(model, (512, 4410), 2) == []
    assert names(model, (512, 8194), 2) == ["rotary-table"]


def test_frames_make_the_rows_shorter() -> None:
    assert names("qwen3-vl-30b-a3b", (512, 16384), 1, 384, has_videos=True) == []
    assert names("qwen3-vl-30b-a3b", (512, 16384), 1, 1, has_videos=True) == ["rotary-table", "frames-held"]


def test_buffers_of_glm_hold_less_than_a_budget_that_items_do_not_divide() -> None:
    assert names("glm-4.1v-9b", (64, 100), 8) == ["floor-division"]
    assert names("glm-4.1v-9b", (64, 104), 8) == []
    assert names("qwen3-vl-8b", (64, 100), 8) == []


def test_kimi_asserts_on_its_position_table() -> None:
    assert names("kimi-vl-a3b", (64, 65536), 1) == []
    assert names("kimi-vl-a3b", (64, 65537), 1) == ["position-grid"]


def test_gemma_3_holds_as_many_crops_as_items() -> None:
    tower = EngineTower("Gemma3ForConditionalGeneration", 1, {"default": 256}, crops=4)
    rules = EngineRules(tower, has_videos=False)
    assert list(rules.broken(BudgetSettings((256, 1280), 2, 0, "greedy-defer"))) == ["crops-of-an-item"]
    assert not rules.broken(BudgetSettings((256, 1280), 5, 0, "greedy-defer"))
    assert names("gemma-3-4b", (256, 1280), 2) == []
    assert names("gemma-3-4b", (128, 256), 2) == ["whole-item"]


def test_items_never_exceed_the_smallest_budget_of_any_family() -> None:
    assert names("llama-4-scout", (144, 288), 145) == ["items-within-budget"]


def test_a_list_for_two_paths_reaches_a_unit_of_each() -> None:
    assert names("deepseek-ocr", (64, 128), 1) == ["path-minimum"]


def test_videos_do_not_overflow_the_list_of_segments() -> None:
    """Frames 0 is a size in the engine: a video of more segments than items would not fit."""
    assert names("qwen2.5-vl-7b", (64, 4096), 1, 0, has_videos=True) == ["frames-held"]
    assert names("qwen2.5-vl-7b", (64, 4096), 1, 0, has_videos=False) == []


@pytest.mark.parametrize("model", SOURCES)
@pytest.mark.parametrize("has_videos", [False, True])
def test_conforming_settings_break_nothing(model: str, has_videos: bool) -> None:
    rules = EngineRules(engine_tower(SOURCES[model]), has_videos)
    unit = max(rules.tower.path_tokens.values())
    for items in (1, 2, 3, 7, 8):
        for top in (unit, 4096, 4410, 16384):
            conforming = rules.conform(BudgetSettings((max(unit, items), max(unit, top)), items, 0, "greedy-defer"))
            assert conforming is None or not rules.broken(conforming)
            assert conforming is None or conforming.max_items == items


def test_a_warning_names_values_rule_source_and_a_way_out() -> None:
    spec = GraphSpec(token_budgets=(512, 4410), max_vision_items_per_batch=1)
    (text,) = engine_notes(resolve_model("qwen3-vl-30b-a3b"), spec, has_videos=False)
    for part in ("budget 4410 with 1 items", "8,192 positions", "qwen3_vl.py", "vLLM 0.33.0", "use budgets up to 4096"):
        assert part in text


def test_automatic_settings_are_the_engines_own_and_warned_of_by_nobody() -> None:
    assert engine_notes(resolve_model("qwen3-vl-30b-a3b"), GraphSpec(), has_videos=True) == []


def test_an_imported_line_that_would_end_the_server_is_noted() -> None:
    config = '{"cudagraph_mm_encoder": true, "encoder_cudagraph_token_budgets": [512, 9000]'
    items = ', "encoder_cudagraph_max_vision_items_per_batch": 2}'
    line = f"vllm serve Qwen/Qwen3-VL-8B-Instruct --compilation-config '{config}{items}'"
    # Frames that are left unset give every item a video's rows, which are shorter.
    assert not any("rotary table" in note for note in import_settings(line).notes)
    images = import_settings(f"{line} --limit-mm-per-prompt '{{\"video\": 0}}'")
    assert any("rotary table has 8,192 positions" in note for note in images.notes)


def test_every_preset_has_a_family_whose_file_is_named() -> None:
    known = {name for family in FAMILIES for name in family.architectures}
    assert {source.architecture for source in SOURCES.values()} <= known | WITHOUT_GRAPHS.keys()
    assert all(re.fullmatch(r"model(s|_executor)/[\w/]+\.py", family.file) for family in FAMILIES)


def test_the_documented_table_is_the_one_of_the_data() -> None:
    assert rules_table() in DOCS.read_text(encoding="utf-8")


def proposals(model: str, trace: str, requests_per_call: int) -> list[str]:
    """What breaks of the settings that a search for the engine finds, on a machine of formulas."""
    source = resolve_model(model)
    rule = source.rule()
    spec = WorkloadSpec(dataset_name="trace", dataset_path=trace, num_prompts=40, num_warmups=0)
    items = []
    for request in build_workload(spec).requests:
        for item in request.items:
            with contextlib.suppress(InputError):
                items.append(rule.item_spec(rule.geometry(item.width, item.height, item.frames, item.fps)))
    calls = [tuple(items[start : start + requests_per_call]) for start in range(0, len(items), requests_per_call)]
    if not calls:
        return []
    traffic = Traffic(calls)
    profile = with_facts(synthetic_profile(), encoder_facts(rule))
    rules = EngineRules(engine_tower(source), traffic.has_videos)
    cost = TargetCost(CostModel(profile), TARGETS[VLLM])
    high = max(16384, traffic.max_tokens)
    result = Search(traffic, cost, profile.encoder, Objective(), Limits(max_graphs=400), high, rules=rules).run()
    assert result.evaluated, model
    return [text for found in result.evaluated for text in rules.broken(found.settings).values()]


@pytest.mark.parametrize("trace", ["mixed-media", "documents"])
@pytest.mark.parametrize("model", ["qwen3-vl-30b-a3b", "glm-4.1v-9b", "gemma-3-4b", "step3-vl-10b", "minicpm-v-2.6"])
def test_no_proposal_breaks_a_rule(model: str, trace: str) -> None:
    assert proposals(model, trace, 2) == []


TOWERS = list({(source.row.name, repr(engine_tower(source))): model for model, source in SOURCES.items()}.values())
"""A preset of each tower as the engine sees it: others of a row differ in widths and depths only."""


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "model"), enumerate(TOWERS))
def test_no_proposal_on_any_trace_and_tower_breaks_a_rule(turn: int, model: str) -> None:
    for number, trace in enumerate(SHIPPED_TRACES):
        assert proposals(model, trace, (1, 4)[(turn + number) % 2]) == [], trace
