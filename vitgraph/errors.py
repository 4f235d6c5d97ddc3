"""Errors that a user can act on, each with the exit status it ends a command with."""

from __future__ import annotations

import re

EXIT_OK = 0
EXIT_UNEXPECTED = 1
EXIT_USAGE = 2
EXIT_NOTHING_REPLAYED = 3
EXIT_INCORRECT = 4
EXIT_SLOWER = 5
EXIT_HUB = 6
EXIT_INTERRUPTED = 130

EXIT_STATUSES = {
    EXIT_OK: "It did what was asked.",
    EXIT_UNEXPECTED: "It could not be done for a reason of its own, which the last line names.",
    EXIT_USAGE: "A setting, an option or an input that cannot be used as given; nothing was run.",
    EXIT_NOTHING_REPLAYED: "Graph mode was asked for, and not one graph was captured or replayed.",
    EXIT_INCORRECT: "Replay and eager disagree beyond the tolerance, or an output is not finite.",
    EXIT_SLOWER: "`--fail-on-slower` was given, and it is slower.",
    EXIT_HUB: "The model hub is needed and cannot be reached.",
    EXIT_INTERRUPTED: "It was stopped (Ctrl-C, SIGTERM, SIGHUP); what was measured is saved.",
}
"""What the exit statuses of every command mean."""


class VitgraphError(Exception):
    """Base of every error whose text is meant for the user: what was given, the rule, a way out."""

    exit_status = EXIT_UNEXPECTED


class UsageError(VitgraphError):
    """A setting, an option or an input file that cannot be used as given."""

    exit_status = EXIT_USAGE


class BudgetError(UsageError):
    """Token budgets, item or frame limits that contradict each other or the model."""


class InputError(UsageError):
    """An image, video, grid or trace row that the model's processor does not take."""


class ModelError(UsageError):
    """A model, preset or checkpoint that cannot be resolved or loaded."""


class HubUnreachableError(UsageError):
    """A model or a data set of the hub that is not here, while the hub cannot be reached."""

    exit_status = EXIT_HUB


class BackendError(UsageError):
    """An attention backend that is unknown, unavailable here, or unfit for the tower."""


class CaptureError(VitgraphError):
    """A graph that could not be captured, or whose captured buffers no longer are what was captured."""


class NothingReplayedError(VitgraphError):
    """Graph mode was asked for and not one graph was captured or replayed."""

    exit_status = EXIT_NOTHING_REPLAYED


class IncorrectOutputError(VitgraphError):
    """Replay and eager disagree beyond the tolerance, or an output is not finite."""

    exit_status = EXIT_INCORRECT


class RankFailedError(VitgraphError):
    """Another rank of the run failed, was killed or hangs; the message names it and what it said.

    Args:
        message: What happened.
        exit_status: Status to end with: that of the failed rank's own error, where it had one.
    """

    def __init__(self, message: str, exit_status: int = EXIT_UNEXPECTED) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class SlowerError(VitgraphError):
    """The verdict is `slower`, of graphs or of the second of two runs, and the user asked for a failure then."""

    exit_status = EXIT_SLOWER


class IncomparableRunsError(VitgraphError):
    """A gate was asked for on runs of which one is not valid, so that it must not pass."""


def first_line(error: BaseException) -> str:
    """Kind and first line of an error, for use as a reason: without addresses, and CUDA's texts go on for a page."""
    lines = re.sub(r"\s*<[^<>]* at 0x[0-9a-fA-F]+>", "", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
