"""Which rank of a run is at fault, from what the ranks say of themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vitgraph.errors import RankFailedError

ERROR, LOST, STOPPED = "error", "lost", "stopped"
"""What a rank may say: it failed; it lost another one; a signal told it to stop."""


def in_short(error: Exception) -> str:
    """The first sentence of an error of torch's, without the place in its source."""
    sentence = re.sub(r"\[\S+:\d+\] ", "", str(error)).strip().split(". ")[0].splitlines()
    return sentence[0] if sentence else type(error).__name__


def find_fault(
    symptom: str,
    own_rank: int,
    places: Sequence[str],
    reports: Mapping[int, Mapping[str, Any]],
    *,
    waited_s: float,
    was_stopped: bool,
) -> RankFailedError | None:
    """Names the rank at fault from what the ranks said; None where all answered and none of them failed.

    Args:
        symptom: What this rank noticed.
        own_rank: This rank.
        places: Each rank in words.
        reports: What each other rank said of itself in that time.
        waited_s: How long they had.
        was_stopped: A signal told this rank to stop, and so perhaps the others.
    """
    own_errors = {rank: report for rank, report in reports.items() if report["kind"] == ERROR}
    if own_errors:
        first = min(own_errors, key=lambda rank: own_errors[rank]["time"])
        return RankFailedError(f"{places[first]} failed: {own_errors[first]['text']}", own_errors[first]["exit_status"])
    silent = [place for rank, place in enumerate(places) if rank != own_rank and rank not in reports]
    if silent:
        return RankFailedError(
            f"{' and '.join(silent)} did not answer within {waited_s:g} s: killed, or hanging. Noticed as {symptom}"
        )
    stopped = {rank: report["time"] for rank, report in reports.items() if report["kind"] == STOPPED}
    if stopped and not was_stopped:
        return RankFailedError(f"{places[min(stopped, key=lambda rank: stopped[rank])]} was told to stop by a signal")
    return None
