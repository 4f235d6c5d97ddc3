"""Measures what the lists of `tune-budgets --target vllm` gain in vLLM 0.33.0's own encoder-graph manager.

    python tests/gpu/vllms_manager.py --wheel-files DIR --output FILE [--compile] [--calibration PROFILE]
    python tests/gpu/vllms_manager.py --show FILE...      the tables of docs/in-vllms-manager.md, from such records

DIR holds the three files of vLLM's wheel that `vllms_files.py` names. Every scenario is searched as the command does,
on one half of the calls, and measured on the other: eager, eager again, vLLM's automatic list, the nine budgets of its
documentation and the tuned list take turns on each call. Where no list keeps `--max-slower-share`, the tuned list is
the best one without that limit. Without a GPU a call on the same buffers stands in for a graph, which tries the command
out and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from vllms_files import VllmsManagers

import vitgraph
from vitgraph.commands.tuning import check_goals
from vitgraph.errors import UsageError
from vitgraph.measure.calls import CallInputs, EncoderCall
from vitgraph.measure.correctness import relative_l2, worst
from vitgraph.measure.experiment import Control, Experiment, TimedCall
from vitgraph.measure.preparation import prepare_bench
from vitgraph.measure.series import CallTimer, Series
from vitgraph.measure.setup import resolve_device, resolve_source
from vitgraph.models.base import EncoderInputs
from vitgraph.models.families.qwen3_vl import Qwen3VLEncoder
from vitgraph.models.grid_encoder import GridTowerEncoder
from vitgraph.planning.budgets import DEFAULT_PATH
from vitgraph.predict.doubt import host_factor, summarize_errors
from vitgraph.predict.engine_rules import ENGINE, MANAGER_FILE
from vitgraph.predict.profile import CalibrationProfile, find_profile
from vitgraph.predict.targets import VLLM
from vitgraph.records.sample_table import EAGER, REPEAT_SUFFIX
from vitgraph.records.stats import count_slower, improvement, summarize
from vitgraph.records.store import write_atomically
from vitgraph.specs.asked import TuneSpec
from vitgraph.specs.fields import spec_from
from vitgraph.specs.parts import ModelSpec
from vitgraph.tuning.advice import tune_budgets
from vitgraph.tuning.host_watch import host_layer_us
from vitgraph.tuning.judge import representative
from vitgraph.tuning.objective import AUTOMATIC, NO_GRAPHS, SEED_NINE, TUNED, USE_GRAPHS

LISTS = (AUTOMATIC, SEED_NINE, TUNED)
AGAIN = EAGER + REPEAT_SUFFIX
RATE = "rate:"
WORKLOAD = {"dataset_path": "mixed-chat", "num_prompts": 3300, "seed": 0}
ANY_SHARE = 1.0
FEWEST_CALLS, WARM_UPS, CHECKPOINT_S = 40, 12, 15.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the search found for one kind of traffic.

    Attributes:
        facts: What the record says of it.
        lists: Budgets and items of each of `LISTS`.
        calls: The calls that the search has not seen; every beginning of them has small and large ones.
        predicted_ms: By list and for eager, what the profile predicts for each of them.
        replays: Of the tuned list, for each of them.
    """

    facts: Mapping[str, Any]
    lists: Mapping[str, tuple[tuple[int, ...], int]]
    calls: Sequence[EncoderCall]
    predicted_ms: Mapping[str, Sequence[float]]
    replays: Sequence[int]


def search(model: Mapping[str, Any], profile: CalibrationProfile, factor: float, scenario: str) -> Scenario:
    """Runs the search of `tune-budgets --target vllm`.

    Args:
        model: Options of the model and its calibration.
        profile: Of the tower.
        factor: How many times as long as the profile's host this one takes.
        scenario: Requests a call, or `rate:` and the requests that arrive in a second.
    """
    is_rate = scenario.startswith(RATE)
    traffic = {"request_rate" if is_rate else "requests_per_call": scenario.removeprefix(RATE)}
    spec = spec_from(TuneSpec, {**model, **WORKLOAD, **traffic, "target": VLLM}, "vllms_manager")
    prepared = prepare_bench(spec.bench)
    objective, limits = check_goals(spec)
    find = partial(
        tune_budgets,
        prepared.calls,
        prepared.source,
        profile,
        max_call_tokens=spec.bench.graph.max_call_tokens,
        objective=objective,
        target=VLLM,
        workload_name=prepared.workload.name,
        share=spec.search_share,
        seed=spec.bench.workload.seed,
        host_factor=factor,
    )
    advice = measured = find(limits=limits)
    if not advice.tuned.outcome.is_kept:
        measured = find(limits=replace(limits, most_slower=ANY_SHARE))
    calls = list(representative(measured.calls, spec.bench.workload.seed))
    cost, plans = measured.tuned.cost, measured.tuned.plans
    predicted = {name: [cost.predict_call(call.specs, *plans[name]) for call in calls] for name in LISTS}
    facts = {
        "scenario": f"{scenario.removeprefix(RATE)} {'requests/s' if is_rate else 'a call'}",
        "compiled": spec.bench.model.compile,
        "profile": profile.label,
        "doubt": "; ".join(profile.doubts(spec.bench.model)) or None,
        "engine": prepared.workload.provenance.get("engine"),
        "verdict": advice.result.verdict,
        "advice": advice.result.verdict_text,
        "max_slower_share": measured.most_slower,
        "split": measured.result.unseen.text,
    }
    return Scenario(
        facts,
        {name: (plan.path_budgets[DEFAULT_PATH], plan.max_items) for name, (plan, _) in plans.items()},
        calls,
        {EAGER: [one.eager_ms for one in predicted[TUNED]]}
        | {name: [one.graph_ms for one in found] for name, found in predicted.items()},
        [sum(times is not None for times in one.replay_ms) for one in predicted[TUNED]],
    )


def keywords(encoder: GridTowerEncoder, inputs: EncoderInputs) -> Any:
    """A call as vLLM hands it over."""
    grids = [[grid.t, grid.h, grid.w] for grid in encoder.grids(inputs.items)]
    return {"pixel_values": inputs.rows("pixel_values").materialize(), "image_grid_thw": grids}


def measure(found: Scenario, managers: VllmsManagers, until: float, save: Callable[[dict[str, Any]], None]) -> bool:
    """Measures the series on the calls of a scenario until a time, and on some calls in any case.

    Args:
        found: The scenario.
        managers: Of its lists.
        until: Of `time.perf_counter`.
        save: Takes the run as the record holds it, now and then and however it ends.

    Returns:
        Whether the user stopped it.
    """
    model, encoder = managers.model, managers.encoder
    captured = {name: managers.captured(*found.lists[name]) for name in LISTS}
    series = [Series(EAGER, model.encoder_eager_forward)]
    series += [Series(name, manager.execute) for name, (manager, _) in captured.items()]
    warm_ups, calls = found.calls[:WARM_UPS], found.calls[WARM_UPS:]
    pixels = CallInputs(encoder, found.calls, seed=0)

    def make(call: EncoderCall) -> Any:
        return keywords(encoder, pixels.make(call))

    experiment = Experiment(series, make, CallTimer(encoder.device), encoder.device)
    experiment.warm_up(warm_ups)
    distances = [
        relative_l2(torch.cat(captured[TUNED][0].execute(inputs)), model.encoder_eager_forward(inputs))
        for inputs in map(make, warm_ups)
    ]
    times: list[dict[str, float]] = []

    def report() -> dict[str, Any]:
        # A call that was stopped in the middle has not met every series.
        done = [place for place, each in enumerate(times) if len(each) == len(series) + 1]
        of_calls = [calls[place] for place in done]
        predicted = {name: each[WARM_UPS:] for name, each in found.predicted_ms.items()}
        return {
            **found.facts,
            "lists": found.lists,
            "captures": {name: facts for name, (_, facts) in captured.items()},
            "max_rel_l2": worst(distances),
            "calls": [call.index for call in of_calls],
            "requests": [len(call.requests) for call in of_calls],
            "tokens": [call.tokens for call in of_calls],
            "images": [len(call.items) for call in of_calls],
            "replays": [found.replays[WARM_UPS + place] for place in done],
            # Of whole calls, in the order in which they were measured.
            "times_ms": {name: [round(times[place][name], 4) for place in done] for name in (EAGER, AGAIN, *LISTS)},
            "predicted_ms": {name: [round(each[place], 4) for place in done] for name, each in predicted.items()},
        }

    def schedule() -> Iterator[tuple[EncoderCall, int]]:
        saved = time.perf_counter()
        for number, call in enumerate(calls):
            now = time.perf_counter()
            if number >= FEWEST_CALLS and now > until:
                return
            if now > saved + CHECKPOINT_S:
                save(report())
                saved = now
            # Libraries choose kernels when they first meet a size: whoever came first would pay for the others.
            model.encoder_eager_forward(make(call))
            times.append({})
            yield call, 0

    def keep(timed: TimedCall) -> None:
        times[-1][timed.series.name + REPEAT_SUFFIX * timed.is_repeat] = timed.time.wall_ms

    try:
        experiment.measure(schedule(), len(calls), keep, control=Control([EAGER], 1))
    finally:
        save(report())
    return experiment.is_interrupted


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Searches, captures and measures every scenario, and saves the record."""
    ends, device = time.perf_counter() + options.time_limit, resolve_device("auto")
    model = {"model": options.model, "load_format": "dummy", "compile": options.compile}
    wanted = {"compile": options.compile}
    profile = find_profile(options.calibration, resolve_source(ModelSpec(model=options.model)), wanted)
    factor, host = host_factor(profile.host, host_layer_us(device))
    looking = partial(search, model | {"calibration": options.calibration}, profile, factor)
    names = options.scenarios.split(",")
    with ProcessPoolExecutor(len(names), multiprocessing.get_context("spawn")) as pool:
        searches = [pool.submit(looking, name) for name in names]
        attention = {"mm_encoder_attn_backend": "FLASH_ATTN"} if device.type == "cuda" else {}
        encoder = vitgraph.load_encoder(**model, **attention)
        scenarios = [one.result() for one in searches]
    if not isinstance(encoder, Qwen3VLEncoder):
        raise UsageError(f"{options.model} is not of the Qwen3-VL family, whose file of vLLM's is read")
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "vitgraph": vitgraph.__version__,
        "model": options.model,
        "attention": encoder.attention.implementation,
        "manager": f"{ENGINE} {MANAGER_FILE}",
        "host": host,
        "host_factor": factor,
        "workload": WORKLOAD,
        "runs": [],
    }

    def save(place: int, of_scenario: dict[str, Any]) -> None:
        record["runs"][place:] = [of_scenario]
        write_atomically(options.output, f"{json.dumps(record)}\n".encode())

    stream = torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(), stream:
        managers = VllmsManagers(options.wheel_files, encoder)
        managers.reserve([one for found in scenarios for one in found.lists.values()])
        for found in scenarios:
            for name in LISTS:
                managers.captured(*found.lists[name])
        for place, found in enumerate(scenarios):
            now = time.perf_counter()
            share = (ends - now) / (len(scenarios) - place)
            # Hosts of lent machines change within minutes, and eager's small calls with them.
            found = replace(found, facts={**found.facts, "host": host_factor(profile.host, host_layer_us(device))[1]})
            if measure(found, managers, now + share, partial(save, place)):
                break
    return record


# -- tables ------------------------------------------------------------------------------------------------------------

GAINS = (
    *("tower", "calls", "advice", "n", "eager, ms", "automatic", "nine", "tuned"),
    *("slower, %", "P99 gain, %"),
)
PREDICTIONS = (
    *("tower", "calls", "measured gain, %", "predicted, %"),
    *("median error of a graph call, %", "of an eager call, %", "eager again, %", "slower, %"),
)
ADVICE = {USE_GRAPHS: "on", NO_GRAPHS: "off"}
TEXTS = 2
"""Columns that hold no numbers, from the left."""


def rows_of(run: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The rows of a run in both tables; times are a request's."""
    requests = np.array(run["requests"])
    measured, predicted = (
        {name: np.array(times) / requests for name, times in run[kind].items()} for kind in ("times_ms", "predicted_ms")
    )
    eager = measured[EAGER]
    gains = {name: improvement(eager, measured[name], "mean", requests) for name in (*LISTS, AGAIN)}
    p99 = [improvement(eager, measured[name], "p99", requests).improvement_pct for name in LISTS]
    slower = [count_slower(eager, measured[name], None, requests).over_2pct_share for name in (*LISTS, AGAIN)]
    names = ["compiled" if run["compiled"] else "not compiled", run["scenario"]]
    intervals = [
        f"{_signed(found.improvement_pct)} ({' … '.join(map(_signed, found.ci95 or ()))})"
        for found in (gains[name] for name in LISTS)
    ]
    shares = [_plain(None if share is None else 100.0 * share) for share in slower]
    has_graph = np.array(run["replays"]) > 0
    graph_error, eager_error = (
        summarize_errors(predicted[name][chosen].tolist(), measured[name][chosen].tolist()).median_pct
        for name, chosen in ((TUNED, has_graph), (EAGER, slice(None)))
    )
    advice = ADVICE.get(run["verdict"], "measure")
    mean = summarize(eager, requests).mean_ms
    first = [*names, advice, str(len(requests)), _plain(mean), *intervals]
    forecast = improvement(predicted[EAGER], predicted[TUNED], "mean", requests).improvement_pct
    second = [
        *names,
        _signed(gains[TUNED].improvement_pct),
        _signed(forecast),
        _plain(graph_error),
        _plain(eager_error),
    ]
    return (
        [*first, " / ".join(shares[: len(LISTS)]), " / ".join(map(_signed, p99))],
        [*second, _signed(gains[AGAIN].improvement_pct), shares[-1]],
    )


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1f}"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def tables_of(records: Sequence[Mapping[str, Any]]) -> list[tuple[Sequence[str], list[list[str]]]]:
    """Headers and rows of the gains, and of the predictions where the profile is of the tower that ran."""
    runs = [run for record in records for run in record["runs"] if run["calls"]]
    gains, predictions = zip(*map(rows_of, runs), strict=True) if runs else ((), ())
    fitting = [row for run, row in zip(runs, predictions, strict=True) if run["doubt"] is None]
    return [(GAINS, list(gains)), (PREDICTIONS, fitting)]


def as_markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as the page has it."""
    line = "---|" * TEXTS + "--:|" * (len(headers) - TEXTS)
    return "\n".join([f"| {' | '.join(headers)} |", f"|{line}", *(f"| {' | '.join(row)} |" for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="print the tables of records and end")
    parser.add_argument("--wheel-files", type=Path, metavar="DIR", help="folder of vLLM's three files")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the record")
    parser.add_argument("--model", default="qwen3-vl-30b-a3b", help="preset of the Qwen3-VL family")
    parser.add_argument("--compile", action="store_true", help="compile the repeated block of the tower")
    parser.add_argument("--calibration", metavar="PROFILE", help="file or shipped name; unset: the tower's shipped one")
    parser.add_argument(
        "--scenarios", default="1,2,4,rate:5,rate:10", help="requests a call, or rate: and requests a second"
    )
    parser.add_argument("--time-limit", type=float, default=200.0, metavar="S", help="seconds of the whole run")
    options = parser.parse_args()
    if options.show:
        tables = tables_of([json.loads(file.read_text(encoding="utf-8")) for file in options.show])
        sys.stdout.write("\n\n".join(as_markdown(*table) for table in tables) + "\n")
        return
    if options.wheel_files is None or options.output is None:
        parser.error("--wheel-files and --output are needed to measure")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for headers, rows in tables_of([run(options)]):
        table = Table(*headers)
        for row in rows:
            table.add_row(*row)
        Console().print(table)


if __name__ == "__main__":
    main()
