"""`vitgraph doctor`, `import` and `models`: what runs here, what another server was set to, what is supported."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitgraph import __version__
from vitgraph.commands.shell import Shown, tell
from vitgraph.hub import start_hub_check
from vitgraph.specs.tools import DoctorSpec, ImportSpec, ModelsSpec

if TYPE_CHECKING:
    from rich.console import Console

_OPTIONAL = ("flash-attn-4", "flashinfer-python", "nvidia-cudnn-frontend", "triton")
_GPU_NUMBERS = {
    "sm_clock_mhz": "clocks.sm",
    "max_sm_clock_mhz": "clocks.max.sm",
    "power_draw_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}


def doctor(spec: DoctorSpec) -> Shown:
    """Show what this machine can run and why not the rest: GPU, libraries, attention backends, hub, memory, clocks.

    Exits with 0 unless nothing can run.
    """
    from vitgraph.errors import VitgraphError
    from vitgraph.report.views.machine import doctor_document

    facts = examine()
    failure = None if facts["can_run"] else VitgraphError("nothing can run here; the lines above say what to install")
    return Shown(facts, doctor_document(facts), failure=failure)


def import_line(spec: ImportSpec) -> Shown:
    """Say the encoder settings of a vLLM or SGLang command line as options of vitgraph."""
    from vitgraph.commands.import_settings import import_settings
    from vitgraph.report.say import clean

    settings = import_settings(sys.stdin.read() if spec.line == "-" else spec.line)

    def render(console: Console) -> None:
        # Not through the console, which would break the line.
        print(clean(settings.command()))
        for note in settings.notes:
            tell(f"note: {note}")
        if settings.left_out:
            tell(f"left out: {', '.join(settings.left_out)}")

    return Shown(settings.as_dict(), render)


def models(spec: ModelsSpec) -> Shown:
    """List the supported models, their presets, and what was verified where."""
    from vitgraph.models.registry import catalog
    from vitgraph.report.to_terminal import render as show
    from vitgraph.report.views.machine import families_markdown, matrix_markdown, models_document

    entries = catalog()

    def render(console: Console) -> None:
        if spec.markdown:
            print(families_markdown(entries), matrix_markdown(entries), sep="\n\n")
        else:
            show(models_document(entries), console)

    return Shown(entries, render)


# -- the doctor's examination -----------------------------------------------------------------------------------------


def examine() -> dict[str, Any]:
    """Everything that `vitgraph doctor` reports, as plain values; what could not be found out is None."""
    hub_answer = start_hub_check()
    facts: dict[str, Any] = {
        "vitgraph": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "memory": read_memory(),
        "libraries": check_requirements(),
    }
    facts |= _examine_devices()
    facts["hub"] = hub_answer()
    facts["can_run"] = _can_run(facts)
    facts["advice"] = _advice(facts)
    return facts


def read_memory(path: Path = Path("/proc/meminfo")) -> dict[str, int | None]:
    """Total and available memory of the host in bytes; None where the system does not say."""
    kilobytes: dict[str, str] = {}
    with contextlib.suppress(OSError):
        kilobytes = dict(re.findall(r"(\w+): +(\d+) kB", path.read_text(encoding="ascii")))
    keys = {"total_bytes": "MemTotal", "available_bytes": "MemAvailable"}
    return {name: int(kilobytes[key]) * 1024 if key in kilobytes else None for name, key in keys.items()}


def check_requirements() -> list[dict[str, Any]]:
    """Rows of each library that vitgraph needs or can use: `name`, `wanted` (a version range; None: optional),
    `installed` (None where it is not) and `fits` (None where that cannot be said)."""
    try:
        lines = metadata.requires("vitgraph") or []
    except metadata.PackageNotFoundError:
        lines = ["torch", "transformers"]
    parts = [re.match(r"([\w.-]+)([^;]*)", line) for line in lines if "extra ==" not in line]
    wanted = {part[1]: part[2].strip() for part in parts if part is not None}
    return [_check(name, wanted.get(name)) for name in dict.fromkeys([*wanted, *_OPTIONAL])]


def _check(name: str, wanted: str | None) -> dict[str, Any]:
    installed, fits = None, None if wanted is None else False
    with contextlib.suppress(metadata.PackageNotFoundError):
        installed = metadata.version(name)
    if wanted is not None and installed is not None:
        fits = None
        with contextlib.suppress(ImportError):
            from packaging.specifiers import SpecifierSet

            fits = SpecifierSet(wanted).contains(installed, prereleases=True)
    return {"name": name, "wanted": wanted, "installed": installed, "fits": fits}


def _examine_devices() -> dict[str, Any]:
    unknown = ("torch", "torch_problem", "cuda", "hip", "driver", "backends_problem")
    found: dict[str, Any] = {**dict.fromkeys(unknown), "gpus": [], "backends": []}
    try:
        import torch
    except (ImportError, OSError) as error:  # a missing CUDA library ends the import with an OSError
        return {**found, "torch_problem": f"torch does not import ({error})"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_gpu = torch.cuda.is_available()
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    if not has_gpu:
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else torch.version.hip and "ROCm"
        detail = f": {str(caught[0].message).splitlines()[0]}" if caught else ""
        sees = f"this torch, built for {built_for}, sees no GPU{detail}"
        found["torch_problem"] = sees if built_for else "this torch is built for CPUs only"
    else:
        found["gpus"] = [_examine_gpu(index) for index in range(torch.cuda.device_count())]
        found["driver"] = next((gpu["driver"] for gpu in found["gpus"] if gpu["driver"]), None)
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    try:
        from vitgraph.attention.registry import describe_backends

        found["backends"] = [_with_generations(row, device) for row in describe_backends(device)]
    except Exception as error:  # a package that is built for something else fails in any way when it is imported
        found["backends_problem"] = f"{type(error).__name__}: {error}"
    return found


def _examine_gpu(index: int) -> dict[str, Any]:
    import torch

    from vitgraph.measure.environment import read_gpu_state

    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    state = read_gpu_state(device)
    values = state.values if state is not None else {}
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # a GPU in exclusive mode that another process holds
        free, total = None, properties.total_memory
    numbers: dict[str, float | None] = dict.fromkeys(_GPU_NUMBERS)
    for name, key in _GPU_NUMBERS.items():
        with contextlib.suppress(ValueError):  # the driver's tool prints [N/A] for what a card does not tell
            numbers[name] = float(values.get(key, ""))
    return {
        "index": index,
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "free_bytes": free,
        "total_bytes": total,
        "driver": values.get("driver_version"),
        **numbers,
        "throttled_by": list(state.throttled_by) if state is not None else None,
        "other_processes": state.other_processes if state is not None else None,
    }


def _with_generations(row: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """The row, with the reason of each generation that cannot run where a backend has several."""
    from vitgraph.attention.registry import backend_class

    generations = None
    if backend_class(row["name"]).has_versions:
        from vitgraph.attention.flash_attn import GENERATIONS

        generations = {str(version): one.unavailable_reason(device) for version, one in GENERATIONS.items()}
    return {**row, "generations": generations}


def _can_run(facts: Mapping[str, Any]) -> list[str]:
    missing = [row["name"] for row in facts["libraries"] if row["wanted"] is not None and row["installed"] is None]
    if facts["torch"] is None or missing:
        return []
    usable = [row for row in facts["backends"] if row["unavailable_reason"] is None]
    names = ", ".join(row["name"] for row in usable if row["is_capture_safe"])
    if facts["gpus"] and names:
        devices = ", ".join(dict.fromkeys(gpu["name"] for gpu in facts["gpus"]))
        return [f"graph and eager mode on {devices} with {names}"]
    if usable and not facts["gpus"]:
        return [
            "plans of any model, and checks of correctness on the CPU (a CPU has no CUDA Graphs: no speed-up there)"
        ]
    return ["eager mode on the GPU"] if usable else []


def _advice(facts: Mapping[str, Any]) -> list[str]:
    found = []
    for row in facts["libraries"]:
        if row["fits"] is False:
            found.append(f"pip install '{row['name']}{row['wanted']}'")
    if facts["torch"] and not facts["gpus"] and shutil.which("nvidia-smi"):
        found.append(
            "an NVIDIA driver is installed, but torch sees no GPU: install a CUDA build of torch that the driver "
            "supports (https://pytorch.org/get-started/locally/)"
        )
    for row in facts["backends"]:
        reasons = [row["unavailable_reason"], *(row["generations"] or {}).values()] if facts["gpus"] else []
        found += [
            reason.rsplit("; ", 1)[-1] for reason in reasons if reason and "install" in reason.rsplit("; ", 1)[-1]
        ]
    for gpu in facts["gpus"]:
        if gpu["throttled_by"]:
            found.append(
                f"GPU {gpu['index']} is throttled ({', '.join(gpu['throttled_by'])}): no run is valid until it cools"
            )
        if gpu["other_processes"]:
            found.append(
                f"GPU {gpu['index']} has {gpu['other_processes']} other process(es): no run is valid beside them"
            )
    if not facts["hub"]["reachable"]:
        found.append(
            "without the hub: presets with --load-format dummy, local checkpoint folders, and traces or local parquet "
            "files all work"
        )
    return list(dict.fromkeys(found))
