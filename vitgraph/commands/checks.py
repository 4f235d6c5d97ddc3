"""What a run refuses before it starts. A dry run asks the same, so that it refuses the same in the same words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vitgraph.commands.shell import Shown
from vitgraph.records.store import ResultFolder
from vitgraph.specs import ModelSpec
from vitgraph.specs.fields import Spec, as_options

if TYPE_CHECKING:
    from rich.console import Console

    from vitgraph.models.registry import ModelSource


def check_run(model: ModelSpec, source: ModelSource | None, folder: Path | None, *, overwrite: bool) -> None:
    """Refuses a run that could not start or could not save; leaves nothing behind.

    Args:
        model: Which encoder, and how it runs.
        source: The model; None where it is checked already.
        folder: Where the record goes; None where none is kept.
        overwrite: A record there may be replaced.

    Raises:
        VitgraphError: The first reason that is found.
    """
    from vitgraph.ranks.launch import is_follower

    if source is not None:
        from vitgraph.measure.setup import check_model
        from vitgraph.models.loading import check_weights

        check_model(source, model)
        check_weights(source, model.load_format)
    if folder is not None and not is_follower():
        with ResultFolder(folder, overwrite):
            pass


def dry_run(spec: Spec, does: str) -> Shown:
    """What `--dry-run` shows of a command without a plan: that it would run, and with which settings."""
    settings = as_options(spec)

    def render(console: Console) -> None:
        for name, value in settings.items():
            console.print(f"{name}: {value}", markup=False, highlight=False)
        console.print(f"{does}; nothing was run", markup=False, highlight=False)

    return Shown({"settings": spec.as_dict()}, render)
