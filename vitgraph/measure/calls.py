"""From requests to encoder calls: grouping, geometries, and the pixels of each call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from vitgraph.errors import InputError
from vitgraph.models.base import EncoderInputs
from vitgraph.models.geometry import GeometryRule, ItemGeometry
from vitgraph.planning.budgets import EncoderItemSpec
from vitgraph.workloads.base import CallMix, Grouping, MediaItem, Request, SkippedItem

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder


@dataclass(frozen=True, slots=True)
class EncoderCall:
    """Items that the encoder gets together.

    Attributes:
        index: Place among the calls.
        requests: Places of its requests in the workload.
        media: Items as the workload has them.
        items: Their geometries.
        specs: Their planner facts.
        items_per_request: How many of the items each request has, in the order of `requests`.
    """

    index: int
    requests: tuple[int, ...]
    media: tuple[MediaItem, ...]
    items: tuple[ItemGeometry, ...]
    specs: tuple[EncoderItemSpec, ...]
    items_per_request: tuple[int, ...] = ()

    @property
    def item_tokens(self) -> list[int]:
        """Output rows of each item, without what any graph adds."""
        return [spec.output_tokens for spec in self.specs]

    @property
    def tokens(self) -> int:
        return sum(self.item_tokens)

    @property
    def input_rows(self) -> int:
        return sum(spec.input_size for spec in self.specs)

    @property
    def tokens_per_request(self) -> list[int]:
        """Output tokens of each of its requests."""
        tokens = iter(self.item_tokens)
        return [sum(islice(tokens, count)) for count in self.items_per_request]

    def shape_inputs(self) -> EncoderInputs:
        """The call without pixels, to ask how it is packed."""
        return EncoderInputs(self.items, {}, {}, tuple(range(len(self.items))))

    @property
    def has_images(self) -> bool:
        """True where the call brings real pixels."""
        return any(media.image is not None for media in self.media)


def part_of(call: EncoderCall, share: Sequence[int]) -> EncoderCall:
    """Some items of a call as a call of their own, perhaps of none; it stands for the same requests."""
    return replace(
        call,
        media=tuple(call.media[index] for index in share),
        items=tuple(call.items[index] for index in share),
        specs=tuple(call.specs[index] for index in share),
        items_per_request=(),
    )


def make_calls(
    requests: Sequence[Request], rule: GeometryRule, grouping: int | Grouping
) -> tuple[list[EncoderCall], list[SkippedItem]]:
    """Groups requests into calls; items that the model's processor refuses are left out and named.

    Requests without items need no encoder and make no call; the others keep their places in the workload.

    Args:
        grouping: Which requests a call has, or how many.

    Raises:
        InputError: No item is left.
    """
    skipped: list[SkippedItem] = []
    kept: dict[int, list[tuple[MediaItem, ItemGeometry]]] = {}
    for request in requests:
        usable = []
        for media in request.items:
            try:
                usable.append((media, rule.geometry(media.width, media.height, media.frames, media.fps)))
            except InputError as error:
                skipped.append(SkippedItem(media.source or f"request {request.index}", str(error)))
        if usable:
            kept[request.index] = usable
    if requests and not kept:
        reason = skipped[0].reason if skipped else "the requests carry no items"
        raise InputError(f"the workload has no item that this model takes: {reason}")
    calls: list[EncoderCall] = []
    group_all = CallMix({grouping: 1.0}) if isinstance(grouping, int) else grouping
    for group in group_all([request for request in requests if request.index in kept]):
        pairs = [pair for request in group for pair in kept[request.index]]
        items = tuple(geometry for _, geometry in pairs)
        calls.append(
            EncoderCall(
                index=len(calls),
                requests=tuple(request.index for request in group),
                media=tuple(media for media, _ in pairs),
                items=items,
                specs=tuple(rule.item_spec(geometry) for geometry in items),
                items_per_request=tuple(len(kept[request.index]) for request in group),
            )
        )
    return calls, skipped


def common_size(calls: Sequence[EncoderCall]) -> int | None:
    """Requests of every call but the last, which takes what is left; None where they differ."""
    sizes = {len(call.requests) for call in calls[: max(1, len(calls) - 1)]}
    return sizes.pop() if len(sizes) == 1 else None


class CallInputs:
    """Makes the device inputs of calls, outside the timing.

    Calls without real pixels read rows of one seeded random pool, whose size is that of the largest call; real images
    go through the model's image processor each time.

    Args:
        calls: Every call that will be asked for.
    """

    def __init__(self, encoder: VisionEncoder, calls: Sequence[EncoderCall], seed: int) -> None:
        self._encoder = encoder
        most: dict[str, int] = {}
        for call in calls:
            if call.has_images:
                continue
            rows: Counter[str] = Counter()
            for item in call.items:
                rows.update(encoder.rule.pixel_rows(item))
            most |= {name: max(most.get(name, 0), count) for name, count in rows.items()}
        self._pool = encoder.random_pixels(most, seed) if most else {}

    def make(self, call: EncoderCall) -> EncoderInputs:
        """The call's inputs on the encoder's device."""
        if not call.has_images:
            return self._encoder.make_inputs(call.items, self._pool)
        images = [_open(media.image) for media in call.media]
        items, pixels = self._encoder.preprocess(images)
        if tuple(items) != call.items:
            raise InputError(
                f"the image processor made {items} of {[media.source for media in call.media]}, the size rule expected "
                f"{list(call.items)}; the model's processor settings differ from the preset's"
            )
        on_device = {name: rows.to(self._encoder.device, self._encoder.dtype) for name, rows in pixels.items()}
        return self._encoder.make_inputs(items, on_device)


def _open(image: object) -> object:
    opener = getattr(image, "open", None)
    # PIL's own images have no `open` method; encoded ones decode here.
    return opener() if callable(opener) else image
