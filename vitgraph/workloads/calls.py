"""Which requests the encoder gets together: a number or a mix of numbers a call, or the calls that a trace names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitgraph.errors import InputError, UsageError
from vitgraph.specs.values import call_shares
from vitgraph.workloads.base import MediaItem, Request

Grouping = Callable[[Sequence[Request]], list[tuple[Request, ...]]]
"""From the requests that have items, in workload order, to the requests of each call, in the order of the calls."""


@dataclass(frozen=True, slots=True)
class CallMix:
    """How many requests the calls have: the share of the calls by that number, drawn with `seed` where there are
    several."""

    shares: Mapping[int, float]
    seed: int = 0

    def __call__(self, requests: Sequence[Request]) -> list[tuple[Request, ...]]:
        """Consecutive requests, as many a call as are drawn; the last call takes what is left."""
        numbers, weights = list(self.shares), list(self.shares.values())
        draw = np.random.default_rng(self.seed)
        groups, start = [], 0
        while start < len(requests):
            size = numbers[0] if len(numbers) == 1 else int(draw.choice(numbers, p=weights))
            groups.append(tuple(requests[start : start + size]))
            start += size
        return groups

    def __str__(self) -> str:
        if len(self.shares) == 1:
            return str(next(iter(self.shares)))
        return ",".join(f"{requests}:{share:.3g}" for requests, share in self.shares.items())


def calls_of_trace(requests: Sequence[Request]) -> list[tuple[Request, ...]]:
    """The calls that a trace's `call` column names, in the order in which they first appear.

    Raises:
        InputError: A request names no call.
    """
    calls: dict[str, list[Request]] = {}
    for request in requests:
        if request.call is None:
            raise InputError(f"request {request.index} names no call; the trace's column `call` names one in every row")
        calls.setdefault(request.call, []).append(request)
    return [tuple(group) for group in calls.values()]


def split_by_calls(requests: Sequence[Request], calls: Sequence[Sequence[tuple[int, int]]]) -> list[Request]:
    """The requests as some calls have them: each names its call, in the order of the calls.

    A call is pairs of request and item place. A request whose items are in several calls becomes one request for each,
    since a call encodes whole requests.
    """
    found: list[Request] = []
    for number, call in enumerate(calls):
        items: dict[int, list[MediaItem]] = {}
        for request, place in call:
            items.setdefault(request, []).append(requests[request].items[place])
        for request, kept in items.items():
            arrival = requests[request].arrival_s
            found.append(Request(len(found), tuple(kept), str(number), arrival))
    return found


def grouping_of(requests_per_call: str | None, requests: Sequence[Request], seed: int) -> Grouping:
    """The grouping that the options ask for: what is given, else the trace's own calls, else one request a call."""
    if requests_per_call is not None:
        return CallMix(call_shares(requests_per_call), seed)
    return calls_of_trace if any(request.call is not None for request in requests) else CallMix({1: 1.0})


def arrivals_of(request_rate: str, requests: Sequence[Request], seed: int) -> list[float]:
    """When each request arrives, in seconds, the first at 0: by the trace's `arrival_s` column where `request_rate` is
    `trace`, else so many a second on average, with exponential gaps drawn with the seed.

    Raises:
        UsageError: Neither a positive number nor `trace`, or the trace has no arrivals.
    """
    if request_rate == "trace":
        found = [request.arrival_s for request in requests if request.arrival_s is not None]
        if len(found) < len(requests):
            raise UsageError(
                "--request-rate trace needs a trace whose column arrival_s names when each request arrives"
            )
        start = min(found, default=0.0)
        return [value - start for value in found]
    try:
        rate = float(request_rate)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise UsageError(f"--request-rate is {rate}; it must be a positive number of requests a second, or `trace`")
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, size=max(0, len(requests) - 1))
    return [0.0, *np.cumsum(gaps).tolist()][: len(requests)]
