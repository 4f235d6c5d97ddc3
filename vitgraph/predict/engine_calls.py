"""The encoder calls that a serving engine makes of arriving requests: a model of vLLM 0.33's scheduler.

Read from vLLM 0.33.0, `v1/core/sched/scheduler.py`, `v1/core/encoder_cache_manager.py` and `multimodal/utils.py`:
a step schedules up to `max_num_batched_tokens` tokens, running requests first, then waiting ones in order. An item is
encoded in the step whose tokens first touch it, while the step's encoder budget and the encoder cache hold it; else
the request's tokens are cut just before it. Consecutive items of one modality in a step are one call. Not modelled: KV
cache limits and preemption, prefix caching, and images that come twice (a trace of sizes does not name them).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from vitgraph.errors import InputError
from vitgraph.planning.budgets import EncoderItemSpec
from vitgraph.workloads.base import SkippedItem, Workload, arrivals_of, split_by_calls

if TYPE_CHECKING:
    from vitgraph.models.geometry import GeometryRule
    from vitgraph.specs.parts import TrafficSpec

MOST_RUNNING = 1024
"""Requests that run at once, vLLM's default on a large GPU."""


@dataclass(slots=True)
class _Running:
    """A request in the engine: `starts` are the places of its items in the prompt."""

    index: int
    items: Sequence[EncoderItemSpec]
    starts: list[int]
    prompt: int
    computed: int = 0
    encoded: int = 0
    generated: int = 0

    def tokens_held(self) -> int:
        """Encoder outputs in the cache that the language model has not passed yet."""
        if self.computed >= self.prompt:
            return 0
        encoded = zip(self.items[: self.encoded], self.starts, strict=False)
        return sum(item.output_tokens for item, start in encoded if start + item.output_tokens > self.computed)


def replay_arrivals(
    requests: Sequence[Sequence[EncoderItemSpec]],
    arrivals_s: Sequence[float],
    encoder_ms: Callable[[Sequence[EncoderItemSpec]], float],
    engine: TrafficSpec,
    step_tokens: int,
) -> list[list[tuple[int, int]]]:
    """Replays arrivals through the scheduler, whose steps hold `step_tokens` tokens.

    Returns:
        Of each call, pairs of request and item place, in order.
    """
    waiting = deque(sorted(range(len(requests)), key=lambda index: (arrivals_s[index], index)))
    largest = max((item.output_tokens for items in requests for item in items), default=0)
    cache = max(step_tokens, largest)
    running: list[_Running] = []
    found: list[list[tuple[int, int]]] = []
    now = 0.0
    while waiting or running:
        if not running and arrivals_s[waiting[0]] > now:
            now = arrivals_s[waiting[0]]
        step = _Step(step_tokens, cache, running)
        for request in running:
            step.schedule(request)
        while waiting and arrivals_s[waiting[0]] <= now and len(running) < MOST_RUNNING and step.tokens_left > 0:
            items = requests[waiting[0]]
            *starts, end = accumulate((item.output_tokens for item in items), initial=0)
            request = _Running(waiting[0], items, starts, max(1, end + engine.text_tokens))
            if not step.schedule(request):
                break
            running.append(request)
            waiting.popleft()
        calls = step.calls()
        found += calls
        by_place = [[requests[request][place] for request, place in call] for call in calls]
        now += (
            sum(map(encoder_ms, by_place)) + engine.lm_step_ms + step.prompt_tokens * engine.lm_us_per_token / 1e3
        ) / 1e3
        running = [request for request in running if request.generated < engine.answer_tokens]
    return found


def replay_workload(
    workload: Workload,
    rule: GeometryRule,
    encoder_ms: Callable[[Sequence[EncoderItemSpec]], float],
    engine: TrafficSpec,
    step_tokens: int,
    seed: int,
) -> Workload:
    """A workload as an engine would call the encoder for it: its requests name their calls.

    A request whose items are in several calls counts as one in each. Arrivals are at the engine's `request_rate`. The
    provenance says what was assumed.

    Args:
        rule: The model's rule; items that it refuses are left out, and named.

    Raises:
        UsageError: The rate is not one, or the trace names no arrivals.
    """
    arrivals = arrivals_of(str(engine.request_rate), workload.requests, seed)
    skipped, requests, specs = list(workload.skipped), [], []
    for request, arrival in zip(workload.requests, arrivals, strict=True):
        usable = []
        for item in request.items:
            try:
                usable.append((item, rule.item_spec(rule.geometry(item.width, item.height, item.frames, item.fps))))
            except InputError as error:
                skipped.append(SkippedItem(item.source or f"request {request.index}", str(error)))
        requests.append(replace(request, items=tuple(item for item, _ in usable), arrival_s=arrival))
        specs.append([spec for _, spec in usable])
    if not any(specs):
        raise InputError(f"no item of {workload.name} is one that this model takes; there is nothing to replay")
    parts = split_by_calls(requests, replay_arrivals(specs, arrivals, encoder_ms, engine, step_tokens))
    provenance = {
        **workload.provenance,
        "request_rate": engine.request_rate,
        "engine": (
            f"assumed, not measured: a step of the language model takes {engine.lm_step_ms:g} ms and "
            f"{engine.lm_us_per_token:g} µs a prompt token, prompts have {engine.text_tokens} text tokens, answers "
            f"{engine.answer_tokens} tokens, a step up to {step_tokens} tokens"
        ),
        "requests_split_over_calls": len(parts) - sum(map(bool, specs)),
    }
    return replace(workload, requests=tuple(parts), skipped=tuple(skipped), provenance=provenance)


class _Step:
    """One step of the scheduler in the making."""

    def __init__(self, tokens: int, cache: int, running: Sequence[_Running]) -> None:
        self.tokens_left, self.encoder_left, self.prompt_tokens = tokens, cache, 0
        self.cache_left = cache - sum(request.tokens_held() for request in running)
        self.items: list[tuple[int, int, str]] = []

    def schedule(self, request: _Running) -> bool:
        """Takes what fits of a request's next tokens and the items that they touch; False where nothing does."""
        if request.computed >= request.prompt:
            request.generated += 1
            self.tokens_left -= 1
            return True
        tokens = self._encode(request, min(request.prompt - request.computed, max(0, self.tokens_left)))
        request.computed += tokens
        request.generated += request.computed == request.prompt
        self.tokens_left -= tokens
        self.prompt_tokens += tokens
        return tokens > 0

    def _encode(self, request: _Running, tokens: int) -> int:
        """Schedules the items in the next `tokens` tokens; returns how many of those the items allow."""
        while request.encoded < len(request.items):
            place, start = request.encoded, request.starts[request.encoded]
            if start >= request.computed + tokens:
                break
            item = request.items[place]
            if item.output_tokens > min(self.encoder_left, self.cache_left):
                return max(0, start - request.computed)
            self.encoder_left -= item.output_tokens
            self.cache_left -= item.output_tokens
            self.items.append((request.index, place, item.modality))
            request.encoded += 1
        return tokens

    def calls(self) -> list[list[tuple[int, int]]]:
        """Runs of consecutive items of one modality."""
        return [[(index, place) for index, place, _ in run] for _, run in groupby(self.items, key=lambda item: item[2])]
