"""Random calls on poisoned buffers: every row's debug tower, every policy, each item against its own eager run.

Before each call everything that a replay must write or be given anew is NaN: outputs, metadata, the pixel rows to come.
`python tests/drills/poisoned_calls.py` runs thousands of calls of each row and writes a table to the terminal; the test
beside this file runs the same.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.correctness import relative_l2
from vitgraph.measure.setup import load, plan_graphs, resolve_source
from vitgraph.models.encoder import VisionEncoder
from vitgraph.planning.accounting import GraphCounters
from vitgraph.planning.packing import POLICIES
from vitgraph.specs.parts import GraphSpec, ModelSpec
from vitgraph.verify.drills import poison_graph_buffers
from vitgraph.verify.probes import Candidate, Probe, ProbeStore, item_catalogue

ROOT = Path(__file__).resolve().parents[2]
CALLS_A_ROW = 2000
SIZES = 16
MOST_ITEMS = 4
TOLERANCE = 1e-5


@dataclass
class Drilled:
    """What came of the calls of a row.

    Attributes:
        counters: Hits, misses and replays.
        largest: Largest relative L2 between an item and its own eager run.
    """

    counters: GraphCounters
    largest: float = 0.0


def debug_models() -> list[str]:
    """A small preset of every row."""
    names = []
    for file in sorted((ROOT / "vitgraph/models/presets").glob("*.json")):
        names += [name for name in json.loads(file.read_text(encoding="utf-8")) if name.endswith("-debug")]
    return names


def sizes_for(encoder: VisionEncoder, drawn: random.Random) -> tuple[list[Candidate], int]:
    """Cheap items, videos among them where the model takes them, one above every graph, and the largest budget."""
    catalogue = sorted(item_catalogue(encoder.rule), key=lambda one: one.flops)
    cheap = catalogue[:SIZES]
    sizes = drawn.sample(cheap, min(SIZES, len(cheap)))
    limit = 4 * sorted(one.tokens for one in sizes)[len(sizes) // 2]
    limit = max(limit, encoder.rule.budget_range(limit)[0])
    return sizes + [one for one in catalogue if one.tokens > limit][:1], limit


def drill_row(model: str, calls: int, seed: int) -> Drilled:
    """Encodes random calls of a row on poisoned buffers.

    Raises:
        AssertionError: An item is not what it is eagerly and alone, or a count is wrong.
    """
    spec = ModelSpec(model, load_format="dummy", device="cpu")
    source = resolve_source(spec)
    encoder, _ = load(source, spec, device=torch.device("cpu"), dtype=torch.float32)
    drawn, store = random.Random(seed), ProbeStore(encoder, seed)
    sizes, limit = sizes_for(encoder, drawn)
    graphs = GraphSpec(max_model_len=limit, max_num_batched_tokens=limit)
    plan = plan_graphs(source.rule(), graphs, [one.spec for one in sizes])
    manager = EncoderCudaGraphManager(encoder, plan)
    manager.capture()
    drilled, items = Drilled(GraphCounters()), 0
    for _ in range(calls):
        chosen = [drawn.choice(sizes) for _ in range(drawn.randint(1, MOST_ITEMS))]
        if drawn.random() < 0.01:
            manager.policy = drawn.choice(POLICIES)
            manager._plans.clear()
        batch = store.batch(chosen)
        counters, difference = encode_poisoned(manager, store, batch)
        drilled.counters.add(counters)
        drilled.largest = max(drilled.largest, difference)
        items += len(batch)
    assert drilled.counters.hits + drilled.counters.misses == drilled.counters.items == items
    return drilled


def encode_poisoned(manager: EncoderCudaGraphManager, store: ProbeStore, batch: list[Probe]) -> tuple[list, float]:
    """The batches of one call, and the largest difference of its items from their own eager runs."""
    inputs = store.inputs(batch)
    call = manager.plan_call(inputs)
    for packed in call.batches:
        for run in packed.runs.values():
            if run.key is not None:
                rows = {name: sum(len(batch[item].pixels[name]) for item in packed.items) for name in batch[0].pixels}
                poison_graph_buffers(manager.graphs[run.key], rows)
    outputs = manager.execute(inputs)
    worst = 0.0
    for probe, output in zip(batch, outputs, strict=True):
        assert output.shape == probe.reference.shape
        difference = relative_l2(output, probe.reference)
        assert difference <= TOLERANCE, f"{probe.candidate.size}: {difference}"
        worst = max(worst, difference)
    return call.batches, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=CALLS_A_ROW, help="calls of each row")
    parser.add_argument("--model", action="append", help="only this preset; may be repeated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write(
        "| model | calls | items | hits | replays | largest relative L2 |\n|---|---:|---:|---:|---:|---:|\n"
    )
    for model in options.model or debug_models():
        found = drill_row(model, options.calls, seed=1)
        counters = found.counters
        counts = (options.calls, counters.items, counters.hits, counters.replays)
        sys.stdout.write(f"| {model} | {' | '.join(map(str, counts))} | {found.largest:.1e} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
