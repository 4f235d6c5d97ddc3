"""The Python side of the commands: the same settings by the same names, on the functions that the commands run.

Options are named as the commands' flags, with underscores (`load_format="dummy"`, `token_budgets=[512, 1024]`); an
unknown one, or a value that a command would refuse, is a `VitgraphError` that says what is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph.errors import InputError, UsageError
from vitgraph.specs.asked import BenchSpec
from vitgraph.specs.fields import spec_from
from vitgraph.specs.parts import GraphSpec, ModelSpec

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from PIL.Image import Image

    from vitgraph.graphs.manager import EncoderCudaGraphManager
    from vitgraph.measure.calls import EncoderCall
    from vitgraph.measure.progress import Progress
    from vitgraph.models.base import EncoderInputs
    from vitgraph.models.encoder import VisionEncoder
    from vitgraph.models.geometry import GeometryRule
    from vitgraph.planning.budgets import BudgetPlan
    from vitgraph.records.record import BenchRecord, Record

    Media = Sequence[tuple[int, int] | tuple[int, int, int] | Image]
    """Items of a call: width and height in pixels, and frames of a video, or images."""


def load_encoder(model: str, **options: Any) -> VisionEncoder:
    """Loads a model's vision encoder, and nothing else of it.

    Args:
        model: Preset, hub id or folder of a checkpoint.
        options: Those of the panel Model of `vitgraph bench --help`: `load_format`, `dtype`, `device`, `compile`, …

    Raises:
        VitgraphError: What cannot be loaded or run; nothing else is used instead.
    """
    from vitgraph.measure.setup import load, resolve_device, resolve_dtype, resolve_source

    spec = spec_from(ModelSpec, {"model": model, **options}, "load_encoder")
    device = resolve_device(spec.device)
    encoder, _ = load(resolve_source(spec), spec, device=device, dtype=resolve_dtype(spec.dtype, device))
    return encoder


def plan(model: str | VisionEncoder, items: Media = (), **options: Any) -> BudgetPlan:
    """Which graphs a model gets; needs neither a GPU nor torch where `model` is a name.

    Args:
        model: The encoder, or its preset, hub id or folder.
        items: What will be encoded; it decides whether videos take part and which keys of an axis are needed.
        options: Those of the panel Graph settings: `token_budgets`, `max_vision_items_per_batch`, …; left out is
            automatic.

    Raises:
        VitgraphError: Settings that contradict each other or the model.
    """
    from vitgraph.measure.setup import plan_graphs

    rule = _rule(model)
    return plan_graphs(rule, spec_from(GraphSpec, options, "plan"), _call(rule, items).specs if items else [])


def explain(model: str | VisionEncoder, plan: BudgetPlan, items: Media, packing: str = "greedy") -> dict[str, Any]:
    """Which items of a call would go into which replay, and why the others would not; see `vitgraph plan`.

    Returns:
        `items`, `batches` with their replays or the reason of a miss, and `counts` of hits, misses and waste.

    Raises:
        VitgraphError: An item that the model's processor does not take, or an unknown packing.
    """
    from vitgraph.tuning.explain import explain_plan

    return explain_plan(_call(_rule(model), items).specs, plan, packing)


def make_inputs(encoder: VisionEncoder, items: Media, seed: int = 0) -> EncoderInputs:
    """Inputs of one call on the encoder's device.

    Args:
        encoder: The encoder.
        items: Sizes, which get random pixels, or images, which go through the model's image processor; not both.
        seed: Seed of the random pixels.

    Raises:
        VitgraphError: An item that the model's processor does not take.
    """
    from vitgraph.measure.calls import CallInputs

    if len({isinstance(item, tuple) for item in items}) > 1:
        raise InputError("a call has sizes or images, and not both; give the sizes of the images, or images alone")
    call = _call(encoder.rule, items)
    return CallInputs(encoder, [call], seed).make(call)


def capture(encoder: VisionEncoder, plan: BudgetPlan, packing: str = "greedy") -> EncoderCudaGraphManager:
    """Captures the graphs of a plan; `execute(inputs)` of the result encodes a call with them, `clear()` frees them.

    On a CPU a replay calls the forward on the same buffers: all is as on a GPU, but for the speed.

    Args:
        encoder: The encoder.
        plan: Which graphs.
        packing: How items are put together: greedy, greedy-defer or exact.

    Raises:
        VitgraphError: The encoder cannot be captured, or an unknown packing.
    """
    from vitgraph.graphs.manager import EncoderCudaGraphManager
    from vitgraph.planning.packing import POLICIES

    if packing not in POLICIES:
        raise UsageError(f"packing is {packing!r}; known: {', '.join(POLICIES)}")
    graphs = EncoderCudaGraphManager(encoder, plan, policy=packing)
    graphs.capture()
    return graphs


def encode_eagerly(encoder: VisionEncoder, inputs: EncoderInputs) -> list[torch.Tensor]:
    """Encodes a call without graphs: the embedding `[rows, width]` of each item, in input order."""
    import torch

    from vitgraph.measure.series import encode_eagerly as encode

    with torch.inference_mode():
        return encode(encoder, inputs)


def bench(model: str, *, progress: Progress | None = None, **options: Any) -> BenchRecord:
    """Measures graph and eager mode on a workload as `vitgraph bench` does, and saves the record.

    Args:
        model: Preset, hub id or folder of a checkpoint.
        progress: Told of every step.
        options: Those of `vitgraph bench --help`; `output_dir` names the folder of the record.

    Raises:
        VitgraphError: As the command ends with; `exit_status` is its status.
    """
    from vitgraph.measure.bench import run_bench
    from vitgraph.measure.preparation import prepare_bench
    from vitgraph.measure.progress import SilentProgress
    from vitgraph.records.store import new_folder

    spec = spec_from(BenchSpec, {"model": model, **options}, "bench")
    if spec.parallel.ranks > 1 or spec.compile_rows:
        raise UsageError(
            "vitgraph.bench measures in this process; tensor_parallel_size and compile_rows are for the command"
        )
    folder = spec.run.output_dir or new_folder("bench", model)
    said = [f"{name}={value!r}" for name, value in {"model": model, **options}.items()]
    command = ["vitgraph.bench", *said]
    record = run_bench(prepare_bench(spec), folder, progress or SilentProgress(), command=command)
    assert record is not None
    return record


def read_record(path: str | Path) -> Record:
    """A saved record of any kind, typed; `path` is its folder or file.

    Raises:
        VitgraphError: There is none, or it is damaged.
    """
    from vitgraph.records import store

    return store.read_record(Path(path))


def read_samples(path: str | Path) -> pd.DataFrame:
    """The samples of a saved record: one row a timed call and series; `docs/records.md` has the columns.

    Raises:
        VitgraphError: There is no record, or it has no samples.
    """
    from vitgraph.records import store
    from vitgraph.records.sample_table import read_samples as read

    file = store.record_file(Path(path))
    record = store.read_record(file)
    if record.samples_file is None:
        raise UsageError(f"{path} is a record of kind {record.kind!r} without samples; read_tables has its tables")
    return read(store.beside(file, record.samples_file)).frame


def read_tables(*paths: str | Path) -> dict[str, pd.DataFrame]:
    """The tidy tables of a saved record, or of several bench runs, by name, as `vitgraph export` writes them.

    Raises:
        VitgraphError: There is no record, one is damaged, or they do not go together.
    """
    from vitgraph.report.documents import arrow_table, document_of_paths

    document, _ = document_of_paths([Path(path) for path in paths])
    return {table.name: arrow_table(table).to_pandas() for table in document.tables}


def _rule(model: str | VisionEncoder) -> GeometryRule:
    from vitgraph.measure.setup import resolve_source

    return resolve_source(ModelSpec(model=model)).rule() if isinstance(model, str) else model.rule


def _call(rule: GeometryRule, items: Media) -> EncoderCall:
    from vitgraph.measure.calls import make_calls
    from vitgraph.workloads.base import MediaItem, number_requests

    media = [
        MediaItem(*item) if isinstance(item, tuple) else MediaItem(item.width, item.height, image=item)
        for item in items
    ]
    calls, skipped = make_calls(number_requests([tuple(media)]), rule, 1)
    if skipped:
        raise InputError(f"not every item is taken: {skipped[0].reason}")
    return calls[0]
