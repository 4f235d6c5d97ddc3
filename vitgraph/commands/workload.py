"""`vitgraph workload`: inspect a workload, make a random one, convert images and logs to a trace of sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitgraph.commands.shell import Shown
from vitgraph.records.store import check_file, write_file
from vitgraph.specs.tools import WorkloadCallsSpec, WorkloadConvertSpec, WorkloadInspectSpec, WorkloadMakeSpec

if TYPE_CHECKING:
    from vitgraph.workloads.base import Workload

FACTS_FILE = "workload.json"


def inspect(spec: WorkloadInspectSpec) -> Shown:
    """Show the sizes of a workload and the output tokens that models make of them: percentiles and a histogram."""
    from vitgraph.measure.setup import resolve_source
    from vitgraph.report.charts import chart_files
    from vitgraph.report.to_files import write_files
    from vitgraph.report.views.workload import workload_document
    from vitgraph.workloads.inspect import inspect_workload
    from vitgraph.workloads.registry import build_workload

    if spec.output_dir is not None:
        # Before the source is read, which can take minutes.
        check_file(spec.output_dir / FACTS_FILE, spec.overwrite)
    rules = {}
    for name in dict.fromkeys(spec.models):
        source = resolve_source(replace(spec.model, model=name))
        rules[name] = (source.row.name, source.rule())
    # Rows repeated to fill a run are no further traffic.
    found = inspect_workload(build_workload(replace(spec.workload, no_oversample=True)), rules)
    document = workload_document(found.facts, found.sizes, found.tokens)
    if spec.output_dir is not None:
        plots = chart_files(document.charts)
        write_files({spec.output_dir / name: content for name, content in plots.items()}, spec.overwrite)
        content = json.dumps(found.facts, indent=1).encode()
        write_file(spec.output_dir / FACTS_FILE, content, "the facts of the workload")
    return Shown(found.facts, document, spec.output_dir, kept_as="plots")


def make(spec: WorkloadMakeSpec) -> Shown:
    """Draw random requests as random-mm does, and write their sizes as a trace."""
    from vitgraph.workloads.registry import build_workload

    check_file(spec.output, spec.overwrite)
    return _save(build_workload(spec.workload), spec.output, spec.overwrite)


def convert(spec: WorkloadConvertSpec) -> Shown:
    """Write the sizes of images or of logged requests as a trace, which others can replay without the images."""
    from vitgraph.workloads.registry import convert_source

    check_file(spec.output, spec.overwrite)
    workload = convert_source(
        spec.source,
        kind=spec.kind,
        pattern=spec.pattern,
        height_first=spec.height_first,
        fields=spec.fields,
        num_requests=spec.num_prompts,
        spec=spec.workload,
    )
    return _save(workload, spec.output, spec.overwrite)


def calls(spec: WorkloadCallsSpec) -> Shown:
    """Write the encoder calls that an engine makes of a workload's requests, as a trace that bench and tune run.

    Beside the trace, a picture of how many requests the calls have.
    """
    from vitgraph.measure.calls import make_calls
    from vitgraph.measure.preparation import arrived
    from vitgraph.measure.setup import resolve_source
    from vitgraph.report.charts import chart_files
    from vitgraph.report.views.workload import call_facts, calls_document
    from vitgraph.workloads.base import grouping_of, split_by_calls
    from vitgraph.workloads.registry import build_workload
    from vitgraph.workloads.trace import save_trace

    check_file(spec.output, spec.overwrite)
    source = resolve_source(spec.model)
    workload = arrived(build_workload(spec.workload), spec, source)
    grouping = grouping_of(spec.run.requests_per_call, workload.requests, spec.workload.seed)
    made, skipped = make_calls(workload.requests, source.rule(), grouping)
    by_index = {request.index: request for request in workload.requests}
    places = [
        [(request, place) for request in call.requests for place in range(len(by_index[request].items))]
        for call in made
    ]
    saved = replace(workload, requests=tuple(split_by_calls(workload.requests, places)))
    path = save_trace(saved, spec.output, overwrite=spec.overwrite)
    facts = {
        **call_facts([len(call.requests) for call in made], [len(call.items) for call in made]),
        "path": str(path),
        "name": workload.name,
        "skipped": [{"source": item.source, "reason": item.reason} for item in [*workload.skipped, *skipped]],
        "provenance": dict(workload.provenance),
    }
    document = calls_document(facts)
    for name, content in chart_files(document.charts).items():
        write_file(path.with_name(f"{path.stem}-{Path(name).name}"), content, "the picture of the calls")
    return Shown(facts, document)


def _save(workload: Workload, output: Path, overwrite: bool) -> Shown:
    from vitgraph.report.views.workload import saved_trace_document
    from vitgraph.workloads.trace import save_trace

    path = save_trace(workload, output, overwrite=overwrite)
    facts = {
        "path": str(path),
        "requests": len(workload.requests),
        "items": workload.num_items,
        "videos": sum(item.frames > 1 for request in workload.requests for item in request.items),
        "fingerprint": workload.fingerprint(),
        "skipped": [{"source": item.source, "reason": item.reason} for item in workload.skipped],
        "provenance": dict(workload.provenance),
    }
    return Shown(facts, saved_trace_document(facts))
