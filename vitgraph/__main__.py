"""The program `vitgraph`, and `python -m vitgraph`."""

from __future__ import annotations

import sys

from vitgraph.commands import process
from vitgraph.commands.process import be_stoppable, end_without_leak_report, flush_output, leave_stops_to_the_end
from vitgraph.errors import EXIT_INTERRUPTED


def main() -> None:
    """Entry point: a stop is one word and its status from the first import to the last line."""
    try:
        be_stoppable()
        from vitgraph.cli import run

        try:
            run()
        finally:
            flush_output()
    except KeyboardInterrupt:
        # Set here and not by a function, since Python delivers a stop where a call begins.
        process.is_ending = True
        _end_stopped()
    except SystemExit as end:
        process.is_ending = True
        leave_stops_to_the_end(end.code if isinstance(end.code, int) else 0)
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
            # Of the parser of the command line, which says nothing.
            _end_stopped()
        end_without_leak_report(end.code)
        raise


def _end_stopped() -> None:
    leave_stops_to_the_end(EXIT_INTERRUPTED)
    from vitgraph.ranks.launch import tells_of_stops

    if tells_of_stops():
        print("stopped", file=sys.stderr)
    sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
