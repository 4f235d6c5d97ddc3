"""`tune_budgets` from workload and profile to verdict, settings, and what to paste."""

from __future__ import annotations

import functools
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import Machine, synthetic_profile

from vitgraph.errors import UsageError
from vitgraph.measure.calls import EncoderCall, make_calls
from vitgraph.measure.setup import resolve_source
from vitgraph.models.registry import ModelSource
from vitgraph.planning.accounting import count_calls
from vitgraph.planning.packing import pack_items
from vitgraph.predict.profile import CalibrationProfile, load_profile, tower_shape
from vitgraph.records.sections import Encoder
from vitgraph.records.tune_result import TuneResult
from vitgraph.specs.asked import TuneSpec
from vitgraph.specs.fields import spec_from
from vitgraph.specs.parts import ModelSpec, WorkloadSpec
from vitgraph.specs.values import parse_compilation_config
from vitgraph.tuning.advice import Advice, tune_budgets
from vitgraph.tuning.objective import Limits, Objective
from vitgraph.workloads.base import MediaItem, Request
from vitgraph.workloads.registry import build_workload

STORED = Path(__file__).parents[2] / "data" / "synthetic-profile.json"
SOURCE = resolve_source(ModelSpec("qwen3-vl-30b-a3b"))


@functools.cache
def trace_calls(name: str = "mixed-chat", prompts: int = 200, requests_per_call: int = 1) -> list[EncoderCall]:
    spec = WorkloadSpec(dataset_name="trace", dataset_path=name, num_prompts=prompts)
    return make_calls(build_workload(spec).requests, SOURCE.rule(), requests_per_call)[0]


def few_sizes(requests_per_call: int = 1) -> list[EncoderCall]:
    """Images of four sizes in turn, so that few calls differ."""
    sides = ((224, 224), (640, 640), (1120, 1120), (1600, 1120))
    requests = [Request(number, (MediaItem(*sides[number * (number + 1) // 2 % 4]),)) for number in range(32)]
    return make_calls(requests, SOURCE.rule(), requests_per_call)[0]


def advised(
    calls: list[EncoderCall] | None = None,
    profile: CalibrationProfile | None = None,
    source: ModelSource = SOURCE,
    **options: Any,
) -> Advice:
    return tune_budgets(
        calls if calls is not None else trace_calls(),
        source,
        profile or load_profile(STORED),
        max_call_tokens=options.pop("max_call_tokens", 16384),
        **options,
    )


def tuned(*given: Any, **options: Any) -> TuneResult:
    return advised(*given, **options).result


@functools.cache
def usual() -> Advice:
    """The advice where nothing is asked for."""
    return advised()


def test_result_beats_its_baselines() -> None:
    result = usual().result
    against, baselines = result.best.against_eager, result.baselines
    assert result.verdict == "use_graphs"
    assert against is not None and baselines.automatic is not None and baselines.seed_nine is not None
    for other in (baselines.automatic.against_eager, baselines.seed_nine.against_eager):
        assert other is not None and against.latency.mean_ms < other.latency.mean_ms
    assert baselines.oracle.mean_ms <= against.latency.mean_ms < baselines.eager.mean_ms
    assert (against.closed_to_oracle_mean or 0.0) > 0.8
    assert (against.closed_to_oracle_median or 0.0) > 0.8
    assert result.best.memory_bytes <= baselines.automatic.memory_bytes
    assert against.slower_share <= 0.01
    assert (result.error.both.median_pct or 100.0) < 5.0
    assert result.measured is None


def test_accounting_is_that_of_the_packing() -> None:
    calls, result = trace_calls(), usual()
    plan, policy = result.tuned.plans["tuned"]
    counters = count_calls([pack_items(call.specs, plan, policy) for call in result.calls])
    assert len(result.calls) == len(calls) // 2
    data = result.result
    assert (data.hits, data.items) == (counters.hits, counters.items)
    assert {row.token_budget: row.items for row in data.by_budget} == {
        row["token_budget"]: row["items"] for row in counters.as_dict()["per_budget"]
    }
    assert sum(row.items for row in data.misses) == counters.misses
    assert {row.reason for row in data.misses} == {"too_many_tokens"}


def test_what_to_paste_is_tuned_for_vllm_and_better_there_than_the_automatic_list() -> None:
    data = usual().result
    settings = parse_compilation_config(data.compilation_config)
    assert settings["encoder_cudagraph_token_budgets"] == list(data.vllm.best.settings.token_budgets)
    assert settings["encoder_cudagraph_max_vision_items_per_batch"] == 1
    assert settings["encoder_cudagraph_max_frames_per_batch"] == 0
    assert data.vllm.best.latency.mean_ms < data.vllm.baselines["automatic"].latency.mean_ms
    assert data.serve_line.startswith("vllm serve Qwen/Qwen3-VL-30B-A3B-Instruct --compilation-config '{")
    assert data.beyond_vllm is not None and data.beyond_vllm.loss_pct > 0


@pytest.mark.parametrize("limit", [None, 0, 2])
def test_the_line_keeps_what_was_asked_of_the_server(limit: int | None) -> None:
    """Settings are for what these options make of the traffic; videos that may come have room."""
    asked = {"mm_processor_kwargs": {"max_pixels": 500000}, "max_num_batched_tokens": 8192, "num_prompts": 200}
    result = tuned(trace_calls(prompts=100), video_limit=limit, asked=asked)
    words = shlex.split(result.serve_line or "")
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert json.loads(given["--limit-mm-per-prompt"]) == {"video": limit or 0}
    assert json.loads(given["--mm-processor-kwargs"]) == asked["mm_processor_kwargs"]
    assert given["--max-num-batched-tokens"] == "8192" and "--num-prompts" not in given
    held = json.loads(given["--compilation-config"])["encoder_cudagraph_max_frames_per_batch"]
    assert bool(held) is bool(limit)


def test_without_videos_in_the_server_graphs_hold_none() -> None:
    calls = trace_calls("mixed-media", 40)
    assert tuned(calls, video_limit=0).best.settings.max_frames_per_batch == 0


def test_an_engine_has_one_backend_where_a_backend_a_graph_was_calibrated() -> None:
    """The line that is pasted names one that exists there, and what it costs is said; long segments have the time."""
    profile = load_profile(STORED)
    shape = {"slots": 1, "is_graph": True}
    small = shape | {"rows": 2048, "longest": 2048, "backend": "TRITON_ATTN"}
    large = shape | {"rows": 16384, "longest": 16384, "backend": "FLASH_ATTN"}
    small["milliseconds"], large["milliseconds"] = (
        {"TRITON_ATTN": 0.01, "FLASH_ATTN": 0.02},
        {
            "TRITON_ATTN": 4.0,
            "FLASH_ATTN": 2.0,
        },
    )
    auto = Encoder(dtype="bfloat16", attn_backend="auto", attn_choices=[small, large])
    profile.environment = profile.environment.but(device_type="cuda", encoder=auto)
    data = tuned(profile=profile, target="vllm")
    assert data.vllm.attn_backend == "FLASH_ATTN"
    assert data.serve_line is not None and data.serve_line.endswith("--mm-encoder-attn-backend FLASH_ATTN")
    (note,) = [note for note in data.notes if "one attention backend" in note]
    assert "FLASH_ATTN is the best alone for these calls, its attention takes 1.0" in note


@pytest.mark.slow
def test_a_profile_is_not_called_that_of_another_model_under_the_models_other_name() -> None:
    profile = synthetic_profile(Machine())
    said = "the profile was measured with"
    profile.name = "qwen3-vl-30b-a3b"
    names = {"qwen3-vl-30b-a3b": False, "Qwen/Qwen3-VL-30B-A3B-Instruct": False, "qwen3-vl-8b": True}
    for name, differs in names.items():
        found = tuned(trace_calls(prompts=20), profile, resolve_source(ModelSpec(name)))
        assert any(note.startswith(said) for note in found.notes) is differs


def test_target_vllm_packs_as_it_does() -> None:
    data = tuned(trace_calls(prompts=200, requests_per_call=2), target="vllm")
    assert data.best.settings.packing == "greedy-defer"
    assert data.best.settings == data.vllm.best.settings
    assert data.beyond_vllm is None


def test_no_graphs_where_eager_is_faster() -> None:
    """Launches cost nothing on this machine, so that a replay saves nothing."""
    profile = synthetic_profile(Machine(launch=0.01, call=0.5))
    data = tuned(trace_calls(prompts=60), profile)
    assert data.verdict == "no_graphs"
    assert "leave graphs off" in data.verdict_text
    assert data.serve_line is None and data.compilation_config is None


def test_a_gain_within_the_error_leaves_graphs_off() -> None:
    """Eager is hardly slower than a replay, and held-out calls are off by 4 %: nothing turns graphs on."""
    profile = synthetic_profile(Machine(launch=0.01))
    profile.holdout = [replace(p, eager=replace(p.eager, ms=1.04 * p.eager.ms)) for p in profile.holdout]
    profile.eager = [replace(p, time=replace(p.time, ms=1.02 * p.time.ms)) for p in profile.eager]
    data = tuned(trace_calls(prompts=200), profile)
    assert data.verdict == "no_graphs"
    assert data.compilation_config is None


def test_a_profile_that_misses_its_own_calls_is_not_acted_on() -> None:
    """A host that was slow while eager calls were timed: the same calls, held out, are twice as fast."""
    profile = load_profile(STORED)
    profile.holdout = [replace(p, eager=replace(p.eager, ms=0.5 * p.eager.ms)) for p in profile.holdout]
    data = tuned(trace_calls(prompts=200), profile)
    assert data.verdict == "measure_first"
    assert "the profile misses its own eager calls by" in data.verdict_text
    assert data.serve_line is None and data.compilation_config is None


def test_a_profile_of_another_tower_of_the_family_is_not_acted_on() -> None:
    profile = load_profile(STORED)
    profile.name, profile.tower = "other", {**tower_shape(SOURCE), "depth": 1}
    data = tuned(trace_calls(prompts=100), profile)
    assert data.verdict == "measure_first"
    assert "the tower of other" in data.verdict_text


@pytest.mark.slow
def test_figures_are_of_calls_that_the_search_has_not_seen() -> None:
    """Every size occurs once: a list that is made of the ones seen pads those that were held back."""
    distinct = list({call.tokens: call for call in trace_calls(prompts=800)}.values())
    data = tuned(distinct)
    unseen = data.unseen
    assert (unseen.method, unseen.calls) == ("split", len(distinct) - round(len(distinct) / 2))
    assert unseen.improvement_pct < unseen.improvement_seen_pct
    assert data.best.against_eager.improvement_pct == pytest.approx(unseen.improvement_pct)
    few = tuned(distinct[:20]).unseen
    assert (few.method, few.calls) == ("cross-validation", 20)
    assert tuned(distinct[:3]).unseen.method == "none"


@pytest.mark.slow
def test_without_a_number_of_requests_the_advice_stands_side_by_side() -> None:
    data = tuned(few_sizes(), regroup=few_sizes, share=1.0)
    rows = data.by_requests_per_call
    assert [row.requests_per_call for row in rows] == [1, 2, 4, 8]
    gains = [row.improvement_pct for row in rows]
    assert gains[0] == max(gains)
    assert len(data.list_for_all) == 4
    assert (data.serve_line is None) == (data.vllm.verdict == "depends")
    assert data.settings_for == "calls of one request"


@pytest.mark.slow
def test_a_list_that_does_not_hold_for_all_calls_is_not_printed() -> None:
    """Eight requests a call keep this GPU busy, so that graphs only pad; one does not."""
    profile = synthetic_profile(Machine(launch=15.0, call=0.1))
    data = tuned(few_sizes(), profile, target="vllm", regroup=few_sizes, share=1.0)
    verdicts = [row.verdict for row in data.by_requests_per_call]
    assert verdicts[0] == "use_graphs" and verdicts[-1] == "no_graphs"
    assert data.verdict == "depends"
    assert data.serve_line is None
    assert "--requests-per-call" in data.verdict_text


def test_the_list_is_tried_on_the_other_shipped_traces() -> None:
    rows = {row.name: row for row in tuned(workload_name="mixed-chat").other_traffic}
    assert set(rows) == {"mixed-media", "documents", "screenshots", "videos"}
    assert rows["documents"].text.startswith("if your traffic turns into documents: +")


def test_videos_get_frames() -> None:
    profile = synthetic_profile(Machine(launch=300.0))
    data = tuned(trace_calls("videos", 16), profile, share=1.0)
    assert data.best.settings.max_frames_per_batch > 1
    assert json.loads(data.compilation_config)["encoder_cudagraph_max_frames_per_batch"] > 1


def test_limits_hold_and_say_so_where_they_cannot() -> None:
    data = tuned(limits=Limits(max_graphs=3))
    assert data.best.graphs <= 3
    with pytest.raises(UsageError, match=r"no settings stay within the limits --max-graph-memory \S+ \(GiB\); raise"):
        tuned(limits=Limits(max_memory_bytes=10.0))


def test_p99_objective_does_not_lose_its_tail() -> None:
    data = tuned(objective=Objective.parse("p99"))
    assert "than eager by --objective p99" in data.verdict_text and "in the mean" not in data.verdict_text
    assert data.best.latency.p99_ms <= data.baselines.automatic.latency.p99_ms * 1.001


def test_profile_of_another_family_is_refused() -> None:
    with pytest.raises(UsageError, match="measured with synthetic"):
        tuned(source=resolve_source(ModelSpec("internvl3.5-8b")))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"target": "sglang"}, "--target is 'sglang'; known: vitgraph, vllm"),
        ({"search_share": 0.0}, "--search-share is 0.0; it must be above 0 and at most 1, which holds no calls back"),
    ],
)
def test_what_cannot_be_tuned_for_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        spec_from(TuneSpec, {"model": "qwen3-vl-debug", **asked}, "here")


def test_extrapolation_and_synthetic_profiles_are_noted() -> None:
    profile = synthetic_profile(budgets=[64, 128, 256, 512, 1024])
    notes = " ".join(tuned(profile=profile).notes)
    assert "extrapolated" in notes
    assert "nothing in it was measured" in notes
