"""`vitgraph profile`: where the time of one call goes; its record, table and plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitgraph.commands.shell import Shown, check_run, dry_run, is_on_gpu, shown_record
from vitgraph.measure.progress import Progress
from vitgraph.records.store import new_folder
from vitgraph.specs import ProfileSpec

GPU_CALL = {"model": "qwen3-vl-30b-a3b", "items": "1024x768"}
CPU_CALL = {"model": "qwen3-vl-debug", "items": "336x336"}


def profiled_call(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is profiled where nothing is named, on this machine's device."""
    call = GPU_CALL if is_on_gpu(given.get("device", "auto")) else CPU_CALL
    is_drawn = "random_mm_bucket_config" in given
    return {name: value for name, value in call.items() if name != "items" or not is_drawn}


def profile(spec: ProfileSpec, progress: Progress) -> Shown:
    """Show where the GPU time of one call goes, eagerly and in replay: attention, products, norms, copies, gaps.

    The call is given by --items, or drawn by the random-mm options. Without --token-budgets its graphs are of exactly
    its size. On a CPU the operators of the forward are shown instead of kernels.
    """
    from vitgraph.measure.profile_call import prepare_profile, run_profile
    from vitgraph.report.documents import write_derived

    prepared = prepare_profile(spec)
    folder = spec.output_dir or new_folder("profile", spec.model.model)
    check_run(spec.model, prepared.source, folder, overwrite=spec.overwrite)
    if spec.shell.dry_run:
        return dry_run(spec, f"would profile {len(prepared.call.items)} item(s) of {prepared.source.name}")
    record = run_profile(prepared, folder, progress)
    write_derived(folder, progress.note)
    return shown_record(record, folder)
