"""`verify` passes the healthy tower, and each kind of broken encoder fails the check that is named for it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch

from vitgraph.attention.registry import create_backend
from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.progress import SilentProgress
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.families.qwen3_vl import Qwen3VLEncoder, Qwen3VLRule
from vitgraph.models.geometry import EncoderCudaGraphPathConfig, GeometryRule, ItemGeometry
from vitgraph.models.loading import randomize, set_implementation
from vitgraph.models.registry import ROWS, resolve_model
from vitgraph.planning.budgets import EncoderItemSpec, GraphKey
from vitgraph.planning.packing import PathRun
from vitgraph.records.results import VerifiedModel
from vitgraph.specs.parts import ModelSpec
from vitgraph.verify.drills import poison_graph_buffers, poison_memory, pool_segments
from vitgraph.verify.models import prepare_rows, run_verification, verify_model
from vitgraph.verify.probes import ProbeStore, find_look_alikes, item_catalogue
from vitgraph.verify.run import plan_verification, verify_row
from vitgraph.verify.session import CPU_EFFORT, GPU_EFFORT

CPU = torch.device("cpu")
BUDGETS = (16, 32, 64)
SETTINGS = {"token_budgets": BUDGETS, "max_items": 4, "calls": 12}


def small_source():
    """The debug preset with images of as few as 4 tokens, so that a replay takes a millisecond or two."""
    source = resolve_model("qwen3-vl-debug")
    return replace(source, processor={**source.processor, "size": {"shortest_edge": 4096, "longest_edge": 16777216}})


def make_encoder(encoder_class=Qwen3VLEncoder):
    source = small_source()
    attention = create_backend("TORCH_SDPA", CPU)
    modules = Qwen3VLEncoder.build_modules(source.vision_config, source.extra, torch.float32, CPU)
    randomize(modules, 0)
    set_implementation(modules, attention.transformers_name)
    rule = encoder_class.rule_class(source.vision_config, source.processor, source.extra)
    return encoder_class(modules.eval().requires_grad_(False), rule, attention)


def verify(encoder_class=Qwen3VLEncoder, **settings) -> VerifiedModel:
    return verify_row(make_encoder(encoder_class), **{**SETTINGS, **settings})


@functools.cache
def verified(encoder_class) -> VerifiedModel:
    """What is found of an encoder, for all tests that look at it."""
    return verify(encoder_class)


def statuses(result: VerifiedModel) -> dict[str, str]:
    return {check.name: check.status for check in result.checks}


def detail_of(result: VerifiedModel, name: str) -> str:
    return next(check.detail for check in result.checks if check.name == name)


# -- the healthy tower ---------------------------------------------------------------------------------------------


def test_the_debug_tower_passes_every_check_in_float32():
    spec = ModelSpec("", load_format="dummy", attn_backend="TORCH_SDPA")
    result = verify_model(resolve_model("qwen3-vl-debug"), spec, CPU, calls=12, max_items=4)
    assert result.error is None
    assert statuses(result).pop("multi_path") == "skipped"
    assert {status for name, status in statuses(result).items() if name != "multi_path"} == {"ok"}
    assert (result.status, result.architecture, result.row) == ("ok", "Qwen3VLForConditionalGeneration", "qwen3_vl")
    assert result.max_rel_l2 <= 1e-5
    assert sum(check.compared for check in result.checks) > 100
    assert result.budgets == {"default": (64, 128, 256)}
    assert (result.calls, result.graphs_dropped) == (12, 0)
    assert (result.backend_requested, result.backend_used, result.dtype) == ("TORCH_SDPA", "TORCH_SDPA", "float32")


def test_the_same_seed_gives_the_same_calls_and_distances_and_another_seed_others():
    few = {"token_budgets": BUDGETS[:1], "calls": 4}
    first, again, other = verify(**few), verify(**few), verify(**few, seed=1)
    assert first.checks == again.checks
    assert first.items != other.items or first.max_rel_l2 != other.max_rel_l2


def test_random_calls_mix_images_and_videos_hits_and_misses_under_every_policy():
    result = verify(calls=20)
    assert "greedy 10, greedy-defer 5, exact 5" in detail_of(result, "random_packings")
    counters = detail_of(result, "counters")
    assert "too_many_tokens" in counters and "not_exact" in counters
    sampled = item_catalogue(small_source().rule())
    assert {candidate.spec.modality for candidate in sampled} == {"image", "video"}


# -- broken encoders, one for each kind of fault -------------------------------------------------------------------


class MixesPaddingIn(Qwen3VLEncoder):
    """Real rows depend on how many rows the graph has."""

    def encoder_cudagraph_forward(self, inputs, scalars, path="default"):
        parts = super().encoder_cudagraph_forward(inputs, scalars, path)
        used = int(inputs["cu_seqlens"][-1]) // self.rule.merge**2
        padding = parts[0][used:]
        return [part + (0.01 * padding.mean() if len(padding) else 0.0) for part in parts]


class ReversesItems(Qwen3VLEncoder):
    """Outputs come in another order than the items."""

    def postprocess_encoder_output(self, mm_kwargs, outputs):
        return super().postprocess_encoder_output(mm_kwargs, outputs)[::-1]


class MiscountingRule(Qwen3VLRule):
    """Counts videos as if time were merged as well."""

    def item_spec(self, geometry):
        spec = super().item_spec(geometry)
        return replace(spec, output_tokens=spec.output_tokens // 2) if spec.segments > 1 else spec


class Miscounts(Qwen3VLEncoder):
    rule_class = MiscountingRule


class KeepsOffsetsByTotal(Qwen3VLEncoder):
    """Offsets are cached by the number of patches: [4, 6, 8] and [5, 5, 8] tokens share an entry."""

    def prepare_encoder_cudagraph_replay_buffers(self, mm_kwargs, capacity):
        values = super().prepare_encoder_cudagraph_replay_buffers(mm_kwargs, capacity)
        cache = self.__dict__.setdefault("offsets", {})
        total = int(values.metadata["cu_seqlens"][-1])
        stale = cache.setdefault(total, values.metadata["cu_seqlens"])
        return replace(values, metadata={**values.metadata, "cu_seqlens": stale})


class FreezesTooLittle(Qwen3VLEncoder):
    """The longest segment is taken to be half of the budget."""

    def capture_scalars(self, capacity):
        return {name: value // 2 for name, value in super().capture_scalars(capacity).items()}


class MakesNaN(Qwen3VLEncoder):
    """One value of a large replay is not finite."""

    def encoder_cudagraph_forward(self, inputs, scalars, path="default"):
        parts = super().encoder_cudagraph_forward(inputs, scalars, path)
        if len(parts[0]) == BUDGETS[-1]:
            parts[0][0, 0] = float("nan")
        return parts


class IsNaNEagerly(Qwen3VLEncoder):
    """The tower itself overflows."""

    def forward_packed(self, inputs, scalars, path):
        return [part * float("inf") for part in super().forward_packed(inputs, scalars, path)]


class RemembersLargerBatches(Qwen3VLEncoder):
    """A workspace that a larger graph re-made changes what a smaller one reads."""

    def encoder_cudagraph_forward(self, inputs, scalars, path="default"):
        parts = super().encoder_cudagraph_forward(inputs, scalars, path)
        before, self.__dict__["last"] = self.__dict__.get("last", 0), len(parts[0])
        captured = self.attention.is_on_graph_path
        return [part * 1.5 for part in parts] if before > len(parts[0]) and not captured else parts


class MixesManyItemsEagerly(Qwen3VLEncoder):
    """Eager calls of six items or more, which only large calls make, add the mean of all rows to each."""

    def encoder_eager_forward(self, mm_kwargs, path="default"):
        rows = super().encoder_eager_forward(mm_kwargs, path)
        return rows + rows.mean() if len(mm_kwargs.chosen) > 5 else rows


class SkipsRepeatedReplays(EncoderCudaGraphManager):
    """A batch that its graph has just encoded is not encoded again, as if nothing else wrote to the output."""

    def _replay(self, mm_kwargs, plan, batch, path, run, rows):
        graph, last = self.graphs[run.key], self.__dict__.get("last")
        pixels = self.model.select_encoder_cudagraph_items(mm_kwargs, batch.items).rows("pixel_values").materialize()
        if last is not None and last[0] == run.key and torch.equal(last[1], pixels):
            graph.replay_count += 1
            self._clone_out(graph.output_buffer, plan, path, batch.items, run.tokens, rows)
        else:
            super()._replay(mm_kwargs, plan, batch, path, run, rows)
        self.__dict__["last"] = (run.key, pixels)


class ReturnsTheOutputBuffer(EncoderCudaGraphManager):
    """Results of a call with one replay are views of the graph's output."""

    def _clone_out(self, output, plan, path, items, tokens, rows):
        if rows[path] is None and tokens == plan.offsets[path][-1]:
            rows[path] = output[:tokens]
        else:
            super()._clone_out(output, plan, path, items, tokens, rows)


class CountsReplaysTwice(EncoderCudaGraphManager):
    def _replay(self, mm_kwargs, plan, batch, path, run, rows):
        super()._replay(mm_kwargs, plan, batch, path, run, rows)
        self.graphs[run.key].replay_count += 1


class KeepsStaleTails(EncoderCudaGraphManager):
    """Rows of an older, larger batch stay behind the new one; a varlen tower does not read them."""

    def capture(self, progress=None):
        super().capture(progress)
        buffers = self._buffers
        buffers.load_pixels = lambda name, rows, capacity: rows.copy_into(buffers.pixels[name])


class NeverReleases(EncoderCudaGraphManager):
    def clear(self):
        self.__dict__.setdefault("kept", []).extend(graph.output_buffer for graph in self.graphs.values())
        super().clear()


class CannotBeClearedTwice(EncoderCudaGraphManager):
    def clear(self):
        if not self.graphs:
            raise KeyError("no graphs to clear")
        super().clear()


@pytest.mark.parametrize(
    ("encoder_class", "check", "words"),
    [
        (MixesPaddingIn, "every_graph", ["relative L2", "budget 16", "segment slots", "item 0"]),
        (ReversesItems, "order", ["holds the rows of item", "budget"]),
        (Miscounts, "predicted_tokens", ["predicted", "eager forward gave"]),
        (KeepsOffsetsByTotal, "stale_metadata", ["the same total with other boundaries", "the second batch"]),
        (FreezesTooLittle, "frozen_scalars", ["max_seqlen is", "frozen at", "budget"]),
        (MakesNaN, "finite", ["not finite", "budget 64", "found by every_graph"]),
        (IsNaNEagerly, "finite", ["eager gives values that are not finite"]),
        (MixesManyItemsEagerly, "random_packings", ["relative L2", "call 0 of seed 0, greedy"]),
        (RemembersLargerBatches, "small_large_small", ["relative L2 0.5", "around budget 16"]),
    ],
)
def test_a_broken_encoder_fails_exactly_the_check_named_for_it(encoder_class, check, words):
    result = verified(encoder_class)
    assert result.error is None
    assert (result.status, result.failed_checks) == ("failed", [check])
    for word in words:
        assert word in detail_of(result, check)


@pytest.mark.parametrize(
    ("manager_class", "check", "words"),
    [
        (SkipsRepeatedReplays, "small_large_small", "values that are not finite: item 0"),
        (ReturnsTheOutputBuffer, "aliasing", "lies in a graph's own memory"),
        (CountsReplaysTwice, "counters", "replays ran"),
        (KeepsStaleTails, "static_buffers", "holds an older batch past row"),
        (NeverReleases, "memory_returned", "still referenced after clear()"),
    ],
)
def test_a_broken_manager_fails_exactly_the_check_named_for_it(manager_class, check, words):
    result = verify(manager_class=manager_class, token_budgets=BUDGETS[:2], calls=4)
    assert result.error is None
    assert (result.status, result.failed_checks) == ("failed", [check])
    assert words in detail_of(result, check)


def test_a_check_that_would_only_repeat_a_fault_is_skipped_with_its_name():
    result = verified(MixesPaddingIn)
    assert statuses(result)["random_packings"] == "skipped"
    assert detail_of(result, "random_packings") == "every_graph failed, which this would only repeat"


# -- several paths -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Views(ItemGeometry):
    """One whole view and `tiles` tiles of an image; small images have no tile."""

    tiles: int


class TwoPathRule(GeometryRule):
    modalities = ("image",)
    output_width = 6

    def image_geometry(self, width, height):
        return Views("image", min(width * height // 100_000, 9))

    def item_spec(self, geometry):
        rows = {"whole": 4, "tiles": 2 * geometry.tiles}
        return EncoderItemSpec("image", 1 + geometry.tiles, sum(rows.values()), 1 + geometry.tiles, rows)

    def pixel_rows(self, geometry):
        return {"whole_pixels": 1, "tile_pixels": geometry.tiles}

    @property
    def paths(self):
        return {
            "whole": EncoderCudaGraphPathConfig(4, has_segments=False),
            "tiles": EncoderCudaGraphPathConfig(2, allow_zero_tokens=True, has_segments=False),
        }

    def min_token_budget(self):
        return 2

    def flops(self, geometry):
        return 100.0 * (1 + geometry.tiles)


class TwoPathEncoder(VisionEncoder):
    """A view is one linear layer; nothing mixes rows, so padding cannot matter."""

    rule_class = TwoPathRule

    @classmethod
    def build_modules(cls, vision_config, extra, dtype, device):
        layers = {"whole": torch.nn.Linear(8, 4 * 6), "tiles": torch.nn.Linear(8, 2 * 6)}
        return torch.nn.ModuleDict(layers).to(device, dtype)

    def path_pixels(self, path):
        return ("whole_pixels",) if path == "whole" else ("tile_pixels",)

    def pixel_row_shape(self, name):
        return (8,)

    def buffer_rows(self, capacity):
        return -(-capacity.token_budget // (4 if capacity.path == "whole" else 2))

    def image_rows(self, image, item):
        pytest.fail("a verification draws its pixels")

    def dummy_items(self, capacity):
        return [Views("image", 1)]

    def forward_packed(self, inputs, scalars, path):
        return [self.modules[path](inputs[self.path_pixels(path)[0]]).view(-1, 6)]

    def stock_rows(self, mm_kwargs):
        pytest.fail("a verification compares with eager, never with the stock forward")

    def postprocess_encoder_output(self, mm_kwargs, outputs):
        pairs = zip(outputs["whole"], outputs["tiles"], strict=True)
        return [torch.cat([rows for rows in pair if rows is not None]) for pair in pairs]


class RunsAbsentPaths(EncoderCudaGraphManager):
    """Items without tiles still get a replay of the tile path."""

    def plan_call(self, mm_kwargs):
        plan = super().plan_call(mm_kwargs)
        key = min(key for key in self.graphs if key.path == "tiles")
        for batch in plan.batches:
            batch.runs.setdefault("tiles", PathRun(0, 0, key))
        return plan


class ForgetsEagerPaths(EncoderCudaGraphManager):
    """Where one path replays and the other goes eager, the eager one's rows are left out."""

    def execute_planned(self, mm_kwargs, plan):
        replays = any(run.key is not None for batch in plan.batches for run in batch.runs.values())
        return super().execute_planned(mm_kwargs, replace(plan, eager_items={}) if replays else plan)


def verify_two_paths(manager_class=EncoderCudaGraphManager) -> VerifiedModel:
    modules = TwoPathEncoder.build_modules({}, {}, torch.float32, CPU)
    randomize(modules, 0)
    encoder = TwoPathEncoder(
        modules.eval().requires_grad_(False), TwoPathRule({}, {}), create_backend("TORCH_SDPA", CPU)
    )
    return verify_row(encoder, calls=12, max_items=4, manager_class=manager_class)


def test_a_two_path_encoder_passes_and_both_partial_cases_are_seen():
    result = verify_two_paths()
    assert (result.error, result.failed_checks) == (None, [])
    assert detail_of(result, "multi_path") == (
        "path 'tiles' absent; only path 'whole' replayed; only path 'tiles' replayed"
    )
    assert set(result.budgets) == {"whole", "tiles"}


def test_a_replay_of_an_absent_path_is_found():
    result = verify_two_paths(RunsAbsentPaths)
    assert result.failed_checks == ["multi_path"]
    assert "path 'tiles' ran for 1x1, which has no rows on it" in detail_of(result, "multi_path")


def test_an_eager_path_left_out_beside_a_replay_is_found():
    result = verify_two_paths(ForgetsEagerPaths)
    assert result.failed_checks == ["every_graph"]
    assert "eager gives" in detail_of(result, "every_graph")


# -- what ends a verification early --------------------------------------------------------------------------------


class Explodes(Qwen3VLEncoder):
    """Fails in a way that no check foresees, once graphs are replayed."""

    def postprocess_encoder_output(self, mm_kwargs, outputs):
        if len(mm_kwargs.items) > 2:
            raise ZeroDivisionError("pooling of no rows")
        return super().postprocess_encoder_output(mm_kwargs, outputs)


class IsInterrupted(Qwen3VLEncoder):
    def capture_scalars(self, capacity):
        raise KeyboardInterrupt


def test_an_unforeseen_exception_becomes_an_error_that_keeps_the_checks_before_it():
    result = verify(Explodes)
    assert (result.status, result.error) == ("error", "ZeroDivisionError: pooling of no rows")
    assert statuses(result)["predicted_tokens"] == "ok"
    assert detail_of(result, "memory_returned") == "not reached"


def test_an_interruption_by_the_user_is_raised():
    with pytest.raises(KeyboardInterrupt):
        verify(IsInterrupted)


def test_clear_that_fails_a_second_time_is_an_error_with_its_reason():
    result = verify(manager_class=CannotBeClearedTwice, token_budgets=BUDGETS[:1], calls=2)
    assert result.status == "error"
    assert "KeyError" in result.error and "no graphs to clear" in result.error


def test_budgets_that_hold_no_item_are_an_error_and_not_a_pass():
    result = verify(token_budgets=(1,), max_items=1)
    assert result.status != "ok"
    assert detail_of(result, "counters") == "not one graph was replayed"


def test_settings_that_contradict_each_other_are_named():
    assert verify(max_items=0).error == "BudgetError: max items is 0; a replay holds at least one"


def test_one_row_that_cannot_be_built_does_not_end_the_others():
    rows = [replace(ROWS[0], name="broken", debug_preset="no-such-preset"), ROWS[0]]
    threads = torch.get_num_threads()
    spec = ModelSpec("", load_format="dummy", device="cpu")
    prepared = prepare_rows(rows, spec, debug_size=True, token_budgets=(64,), max_items=2, calls=2)
    results = run_verification(prepared, SilentProgress()).result.models
    assert [result.status for result in results] == ["error", "ok"]
    assert results[0].error.startswith("ModelError: model 'no-such-preset'")
    assert results[1].row == ROWS[0].name
    assert torch.get_num_threads() == threads


def test_a_backend_that_is_not_available_is_an_error_of_its_row():
    spec = ModelSpec("", load_format="dummy", attn_backend="FLASH_ATTN")
    result = verify_model(resolve_model("qwen3-vl-debug"), spec, CPU)
    assert result.status == "error"
    assert "FLASH_ATTN cannot run on cpu" in result.error
    assert (result.backend_requested, result.backend_used) == ("FLASH_ATTN", None)


def test_values_that_are_not_numbers_leave_no_distance():
    result = verified(IsNaNEagerly)
    assert (result.architecture, result.status, result.max_rel_l2) == ("IsNaNEagerly", "failed", None)
    assert result.failed_checks == ["finite"]
    assert [check.name for check in result.checks][:2] == ["predicted_tokens", "frozen_scalars"]


# -- sizes, budgets, look-alikes -----------------------------------------------------------------------------------


def test_default_budgets_are_a_short_list_from_the_models_smallest():
    assert plan_verification(resolve_model("qwen3-vl-debug").rule(), CPU_EFFORT).path_budgets == {
        "default": (64, 128, 256)
    }
    assert plan_verification(resolve_model("qwen3-vl-debug").rule(), GPU_EFFORT).path_budgets == {
        "default": (64, 128, 256, 512, 1024)
    }


def test_look_alikes_share_a_total_and_have_other_boundaries():
    rule = small_source().rule()
    key = GraphKey("default", 64, 8)
    catalogue = [candidate for candidate in item_catalogue(rule) if candidate.tokens <= 64]
    found = {pair.kind: pair for pair in find_look_alikes(catalogue, key, has_segments=True)}
    pair = found["the same total with other boundaries"]
    first, second = ([one.tokens for one in batch] for batch in (pair.first, pair.second))
    assert sum(first) == sum(second) <= 64
    assert sorted(first) != sorted(second)
    assert set(found) == {
        "the same total with other boundaries",
        "the same items in another order",
        "the same tokens in another shape",
    }


# -- poison --------------------------------------------------------------------------------------------------------


def test_poison_reaches_outputs_and_inputs_and_the_next_replay_overwrites_all_of_it():
    encoder = make_encoder()
    manager = EncoderCudaGraphManager(encoder, plan_verification(encoder.rule, CPU_EFFORT, BUDGETS, 4))
    manager.capture()
    store = ProbeStore(encoder, 0)
    with torch.inference_mode():
        probes = store.batch([one for one in item_catalogue(encoder.rule) if one.tokens == 16][:1])
        inputs = store.inputs(probes)
        (run,) = manager.plan_call(inputs).batches[0].runs.values()
        graph = manager.graphs[run.key]
        poison_graph_buffers(graph, {"pixel_values": 64})
        assert graph.output_buffer.isnan().all()
        assert graph.input_buffers["pixel_values"][:64].isnan().all()
        assert not graph.input_buffers["pixel_values"][64:].isnan().any()
        assert (graph.input_buffers["cu_seqlens"] == -1).all()
        (output,) = manager.execute(inputs)
        assert (output - probes[0].reference).abs().max() < 1e-5
    assert pool_segments(manager.graphs.values(), CPU) == []


@pytest.mark.requires_cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_private_pool_is_poisoned_and_the_tower_passes():
    device = torch.device("cuda", 0)
    kept = torch.ones(1 << 20, device=device)
    result = verify_model(resolve_model("qwen3-vl-debug"), ModelSpec("", load_format="dummy"), device, calls=40)
    assert (result.error, result.failed_checks) == (None, [])
    assert "MiB of graph pool poisoned" in detail_of(result, "small_large_small")
    assert (kept == 1).all()


@pytest.mark.requires_cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_poison_fills_exactly_the_segments_it_is_given():
    device = torch.device("cuda", 0)
    memory = torch.zeros(1024, device=device)
    assert poison_memory([(memory.data_ptr() + 1024, 2048)], device) == 2048
    assert memory[256:768].isnan().all()
    assert (memory[:256] == 0).all() and (memory[768:] == 0).all()
