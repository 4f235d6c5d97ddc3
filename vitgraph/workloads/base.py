"""The words of a workload: items, requests, the fingerprint of their sizes, and which requests are encoded together."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vitgraph.errors import InputError, UsageError
from vitgraph.planning.budgets import IMAGE, MOST_FRAMES, VIDEO
from vitgraph.specs.values import call_shares

MOST_SIDE = 999_999_999
"""Pixels along a side; also what is no number of frames."""

RATE_RULE = "a positive number, from 0.001 to 1,000,000"

Provenance = dict[str, str | int | float | bool | None]


@dataclass(frozen=True)
class MediaItem:
    """One image or video as it is handed to a model's processor.

    Attributes:
        width: Pixels across.
        height: Pixels down.
        frames: 1 for an image, more for a video.
        fps: Frames a second of the video file where `frames` counts file frames and the model's loader still samples
            them; None where `frames` already is what reaches the processor. An image has none, whatever is given.
        source: Where the item comes from, for messages (`mixed-chat.csv:17`).
        image: A PIL image or an `EncodedImage`; None means that random pixels of this size are used. It takes no part
            in equality or in the fingerprint.
    """

    width: int
    height: int
    frames: int = 1
    fps: float | None = None
    source: str = ""
    image: object | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("width", "height", "frames"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MOST_SIDE:
                raise InputError(
                    f"{self.source or 'item'}: {name} is {value!r}; it must be a positive integer of at most "
                    f"{MOST_SIDE}, for example {'1 for an image' if name == 'frames' else '640'}"
                )
        if self.frames > MOST_FRAMES:
            raise InputError(f"{self.source or 'item'}: frames is {self.frames}; a video has at most {MOST_FRAMES}")
        if self.fps is not None and not is_rate(self.fps):
            raise InputError(
                f"{self.source or 'item'}: fps is {self.fps!r}; it must be {RATE_RULE}, for example 29.97, or be left "
                "out where frames are already sampled"
            )
        if self.frames == 1:
            object.__setattr__(self, "fps", None)

    @property
    def modality(self) -> str:
        """`image` for one frame, `video` for more."""
        return IMAGE if self.frames == 1 else VIDEO


@dataclass(frozen=True)
class Request:
    """The items that one prompt carries, in order; there may be none.

    Attributes:
        index: Place of the request among the measured requests (or among the warm-ups), from 0.
        call: The encoder call that the source puts it in; None where it names none.
        arrival_s: When it arrived, in seconds; None where the source does not say.
    """

    index: int
    items: tuple[MediaItem, ...]
    call: str | None = None
    arrival_s: float | None = None


@dataclass(frozen=True)
class SkippedItem:
    """An item of the source that could not be used, and why, in words for the user."""

    source: str
    reason: str


@dataclass(frozen=True)
class Workload:
    """Requests to measure, requests to warm up with, and where they come from.

    Attributes:
        name: Short name for tables.
        requests: Measured requests, in order.
        warmups: Requests that run before the clock counts.
        skipped: Items of the source that were left out, each with its reason.
        provenance: Facts that a reader of a result needs: source, seed, what was drawn, shrunk or repeated.
    """

    name: str
    requests: tuple[Request, ...]
    warmups: tuple[Request, ...] = ()
    skipped: tuple[SkippedItem, ...] = ()
    provenance: Provenance = field(default_factory=dict)

    @property
    def num_items(self) -> int:
        """Items of the measured requests."""
        return sum(len(request.items) for request in self.requests)

    @property
    def has_videos(self) -> bool:
        """Whether any request, measured or warm-up, carries a video."""
        return any(item.frames > 1 for request in (*self.requests, *self.warmups) for item in request.items)

    def fingerprint(self) -> str:
        """Names the ordered sizes of the measured requests: equal for equal sizes, whatever the pixels.

        Returns:
            16 hexadecimal digits of a SHA-256 over one line a request, its items as `WxHxFRAMES`, and `@FPS` after
            those whose frames are still to be sampled.
        """
        lines = (",".join(_size_text(item) for item in request.items) + "\n" for request in self.requests)
        return hashlib.sha256("".join(lines).encode("ascii")).hexdigest()[:16]


def number_requests(groups: Iterable[tuple[MediaItem, ...]]) -> tuple[Request, ...]:
    """Requests numbered from 0 in the order of `groups`."""
    return tuple(Request(index, items) for index, items in enumerate(groups))


def choose_warmups(
    groups: Sequence[tuple[MediaItem, ...]], num_prompts: int, num_warmups: int, seed: int
) -> tuple[tuple[Request, ...], str]:
    """Warm-ups that are other requests than the measured ones where there are enough, and a sentence for the
    provenance.

    `groups` are the items of every request of the source, the first `num_prompts` of them measured; a draw uses the
    seed after the workload's.
    """
    if num_warmups == 0:
        return (), "none"
    if len(groups) - num_prompts >= num_warmups:
        return number_requests(groups[num_prompts : num_prompts + num_warmups]), "the requests after the measured ones"
    drawn = np.random.default_rng(seed + 1).integers(len(groups), size=num_warmups)
    return (
        number_requests(groups[int(index)] for index in drawn),
        f"drawn among all requests with seed {seed + 1}, since too few are left after the measured ones",
    )


def shrink_size(width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
    """The largest width and height of the same shape with at most `max_pixels` pixels, rounded down to whole pixels.

    A side never falls below 1, so an item whose aspect ratio exceeds `max_pixels` loses its shape, not the bound.
    """
    if max_pixels is None or width * height <= max_pixels:
        return width, height
    scale = math.sqrt(max_pixels / (width * height))
    new_width = min(max(1, math.floor(width * scale)), max_pixels)
    new_height = min(max(1, math.floor(height * scale)), max_pixels // new_width)
    return new_width, new_height


def is_rate(value: object) -> bool:
    """Whether `value` can be frames a second or seconds of a video, by `RATE_RULE`; a truth value cannot."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.001 <= value <= 1e6


def _size_text(item: MediaItem) -> str:
    rate = "" if item.fps is None else f"@{float(item.fps)!r}"
    return f"{item.width}x{item.height}x{item.frames}{rate}"


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
