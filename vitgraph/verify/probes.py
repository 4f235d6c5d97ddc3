"""What verification encodes: a catalogue of item sizes, probes with own pixels, and batches that fill a graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
import torch

from vitgraph.errors import IncorrectOutputError, InputError
from vitgraph.measure import series
from vitgraph.measure.correctness import own_errors
from vitgraph.models.base import EncoderInputs
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.geometry import GeometryRule, ItemGeometry
from vitgraph.planning.budgets import VIDEO, EncoderItemSpec, GraphKey

ODD_SIZES = ((1, 1), (31, 33), (100, 75), (225, 223), (333, 500), (640, 480), (480, 640), (1280, 720))
LONG_SIZES = ((700, 100), (100, 700), (2000, 64), (64, 2000), (1500, 300), (300, 1500))
SIDES = tuple(round(32 * 2 ** (step / 4)) for step in range(29))
ASPECTS = ((1, 1), (1, 2), (3, 2))
VIDEO_FRAMES = (2, 3, 4, 8, 16, 32, 64)
VIDEO_SIZES = ((48, 48), (64, 64), (96, 64), (224, 224), (180, 320))
PAIR_CANDIDATES = 24
PER_STRATUM = 2
"""Sizes of each modality between two budgets."""


class PredictedTokensError(IncorrectOutputError):
    """An eager forward gave other rows or columns than the model's rule says."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An item size that the model takes: geometry, planner facts, floating-point operations, and width x height (x
    frames) that it stands for."""

    geometry: ItemGeometry
    spec: EncoderItemSpec
    flops: float
    size: str

    @property
    def tokens(self) -> int:
        return self.spec.output_tokens


def item_catalogue(rule: GeometryRule) -> list[Candidate]:
    """Every distinct geometry of the sizes above that the model's rule accepts, fewest tokens first."""
    sizes = [(width, height, 1) for width, height in (*ODD_SIZES, *LONG_SIZES)]
    sizes += [(side * wide, side * high, 1) for side in SIDES for wide, high in ASPECTS]
    if VIDEO in rule.graph_config().modalities:
        sizes += [(width, height, frames) for frames in VIDEO_FRAMES for width, height in VIDEO_SIZES]
    found: dict[ItemGeometry, Candidate] = {}
    for width, height, frames in sizes:
        try:
            geometry = rule.geometry(width, height, frames)
        except InputError:
            continue
        if geometry not in found:
            size = f"{width}x{height}" + (f"x{frames}" if frames > 1 else "")
            found[geometry] = Candidate(geometry, rule.item_spec(geometry), rule.flops(geometry), size)
    return sorted(found.values(), key=lambda candidate: (candidate.tokens, candidate.flops))


def sample_candidates(
    catalogue: Sequence[Candidate], budgets: Sequence[int], oversize: int, rng: np.random.Generator
) -> list[Candidate]:
    """Sizes for random calls: some of each modality from every interval between the ascending `budgets`, chosen by
    `rng`, and above the largest the `oversize` cheapest with half as many tokens again."""
    chosen: list[Candidate] = []
    for low, high in zip([0, *budgets], budgets, strict=False):
        by_modality: dict[str, list[Candidate]] = defaultdict(list)
        for candidate in catalogue:
            if low < candidate.tokens <= high:
                by_modality[candidate.spec.modality].append(candidate)
        for members in by_modality.values():
            picked = sorted(rng.permutation(len(members))[:PER_STRATUM])
            chosen += [members[index] for index in picked]
    above = sorted((one for one in catalogue if 2 * one.tokens > 3 * budgets[-1]), key=lambda one: one.flops)
    return chosen + above[:oversize]


@dataclass(slots=True)
class Probe:
    """One item with random pixels that no other item has.

    Attributes:
        seed: Seed of its pixels.
        pixels: Its rows of each pixel buffer.
        reference: Its embedding when it is encoded eagerly and alone.
        own_error: Relative L2 distance of that from float32; None until it is asked for.
    """

    candidate: Candidate
    seed: int
    pixels: dict[str, torch.Tensor]
    reference: torch.Tensor
    own_error: float | None = None


@dataclass(slots=True)
class ProbeStore:
    """Makes probes once each and puts calls together; every pixel derives from `seed`."""

    encoder: VisionEncoder
    seed: int
    _probes: dict[tuple[ItemGeometry, int], Probe] = field(default_factory=dict)

    def get(self, candidate: Candidate, copy: int = 0) -> Probe:
        """Probe number `copy` of a size, with its eager reference.

        Raises:
            PredictedTokensError: Its eager forward gave other rows than the rule says.
        """
        name = (candidate.geometry, copy)
        if name not in self._probes:
            seed = self.seed * 1_000_003 + len(self._probes)
            rows = self.encoder.rule.pixel_rows(candidate.geometry)
            pixels = {
                buffer: tensor[: rows[buffer]] for buffer, tensor in self.encoder.random_pixels(rows, seed).items()
            }
            inputs = self.encoder.make_inputs([candidate.geometry], pixels)
            reference = encode_eagerly(self.encoder, inputs, [candidate.size])[0]
            self._probes[name] = Probe(candidate, seed, pixels, reference)
        return self._probes[name]

    def batch(self, candidates: Iterable[Candidate]) -> list[Probe]:
        """A probe for each candidate; repeated sizes get pixels of their own."""
        seen: dict[ItemGeometry, int] = defaultdict(int)
        probes = []
        for candidate in candidates:
            probes.append(self.get(candidate, seen[candidate.geometry]))
            seen[candidate.geometry] += 1
        return probes

    def rounding(self, probe: Probe) -> float:
        """What the dtype alone costs: how far the probe's eager reference is from float32."""
        if probe.own_error is None:
            (probe.own_error,) = own_errors(self.encoder, self.inputs([probe]), [probe.reference])
        return probe.own_error

    def inputs(self, probes: Sequence[Probe]) -> EncoderInputs:
        """One call of these probes, in this order."""
        pixels = {name: torch.cat([probe.pixels[name] for probe in probes]) for name in probes[0].pixels}
        return self.encoder.make_inputs([probe.candidate.geometry for probe in probes], pixels)


def encode_eagerly(encoder: VisionEncoder, inputs: EncoderInputs, sizes: Sequence[str] = ()) -> list[torch.Tensor]:
    """The call's embeddings, every path on all of its items at once and without padding; `sizes` name the items in an
    error.

    Raises:
        PredictedTokensError: A path gave other rows or columns than predicted.
    """
    config = encoder.get_encoder_cudagraph_config()

    def check(path: str, rows: torch.Tensor, expected: int) -> None:
        if tuple(rows.shape) != (expected, config.output_width):
            raise PredictedTokensError(
                f"{', '.join(sizes) or 'a call'} on path {path!r}: predicted {expected} rows of "
                f"{config.output_width}, the eager forward gave {' x '.join(map(str, rows.shape))}"
            )

    outputs = series.encode_eagerly(encoder, inputs, check)
    for index, spec in enumerate(encoder.get_encoder_cudagraph_item_specs(inputs)):
        total = sum(spec.tokens_on(path) for path in config.paths)
        if total != spec.output_tokens:
            raise PredictedTokensError(
                f"{sizes[index] if sizes else f'item {index}'}: {spec.output_tokens} tokens predicted, but "
                f"{total} over its paths"
            )
    return outputs


class LookAlikes(NamedTuple):
    """Two batches that a graph keyed or cached too coarsely would confuse, and what they share."""

    kind: str
    first: list[Candidate]
    second: list[Candidate]


SAME_TOTAL = "the same total with other boundaries"
SAME_ITEMS = "the same items in another order"
SAME_TOKENS = "the same tokens in another shape"


def find_look_alikes(usable: Sequence[Candidate], key: GraphKey, *, has_segments: bool) -> list[LookAlikes]:
    """Pairs of batches for one graph, the cheapest of each kind that the sizes allow.

    The kinds are the same total with other boundaries (as [4, 6, 8] and [5, 5, 8] tokens), the same items in another
    order, and the same tokens in another shape.
    """
    path = key.path
    few = sorted(usable, key=lambda candidate: candidate.flops)[:PAIR_CANDIDATES]
    pairs = [
        (first, second)
        for first, second in combinations_with_replacement(few, 2)
        if first.spec.tokens_on(path) + second.spec.tokens_on(path) <= key.token_budget
        and (not has_segments or first.spec.segments + second.spec.segments <= key.segment_slots)
    ]
    pairs.sort(key=lambda pair: pair[0].flops + pair[1].flops)
    found = []
    by_total: dict[int, tuple[Candidate, Candidate]] = {}
    for pair in pairs:
        known = by_total.setdefault(sum(_row_counts(pair, path)), pair)
        if _row_counts(known, path) != _row_counts(pair, path):
            found.append(LookAlikes(SAME_TOTAL, list(known), list(pair)))
            break
    for first, second in pairs:
        if first.spec.tokens_on(path) != second.spec.tokens_on(path):
            found.append(LookAlikes(SAME_ITEMS, [first, second], [second, first]))
            break
    shapes: dict[int, Candidate] = {}
    for candidate in few:
        twin = shapes.setdefault(candidate.spec.tokens_on(path), candidate)
        if twin.geometry != candidate.geometry:
            found.append(LookAlikes(SAME_TOKENS, [twin], [candidate]))
            break
    return found


def _row_counts(pair: tuple[Candidate, Candidate], path: str) -> list[int]:
    return sorted(candidate.spec.tokens_on(path) for candidate in pair)
