"""Reads the values of options that are more than a number or a name (lists, JSON, sizes), and the rules of values.

What a reader does not take is a UsageError that says what to give.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vitgraph.errors import UsageError
from vitgraph.planning.budgets import IMAGE, VIDEO
from vitgraph.reading import parse_json

MOST_TOKENS = 2**24
"""Output tokens that a budget may have: sixteen million, thousands of times the largest of any model."""

MOST_ITEMS = 4096
"""Items that a call or a request may be asked to have."""

MOST_INT = 2**63 - 1
"""What a seed may be at most: torch, numpy and the files all take 64 bits with a sign."""

MOST_COUNT = 10**7
"""What a count may be at most unless its option says less or more: a slip of the keys must not run for days."""

Rule = Callable[[Any], str | None]
"""Says what must hold for a value that it does not take; None for one that it takes."""

Size = tuple[int, int, int]
"""Width and height in pixels, and frames (1 for an image)."""

_ITEM = re.compile(r"(?:(?P<count>\d{1,9})\s*\*\s*)?(?P<width>\d{1,9})x(?P<height>\d{1,9})(?:x(?P<frames>\d{1,9}))?")
_HUMAN_NUMBER = re.compile(r"(\d{1,40}(?:\.\d{1,9})?)([kmgKMG]?)")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

ENCODER_FIELDS = {
    "encoder_cudagraph_token_budgets": "token_budgets",
    "encoder_cudagraph_max_vision_items_per_batch": "max_vision_items_per_batch",
    "encoder_cudagraph_max_frames_per_batch": "max_frames_per_batch",
}
"""Fields of vLLM's compilation config that set the encoder's graphs, each with the option that it stands for."""

ENABLED_FIELD = "cudagraph_mm_encoder"

COMPILATION_FIELDS = frozenset({
    "backend", "bs_to_padded_graph_size", "cache_dir", "compilation_time", "compile_cache_save_format",
    "compile_mm_encoder", "compile_ranges_endpoints", "compile_ranges_split_points", "compile_sizes",
    "cudagraph_capture_sizes", "cudagraph_copy_inputs", "cudagraph_decoder_replay", "cudagraph_mode",
    "cudagraph_num_of_warmups", "cudagraph_specialize_lora", "custom_ops", "debug_dump_path",
    "decoder_replay_cudagraph_capture_sizes", "decoder_replay_trim_threshold", "disabled_custom_ops",
    "dynamic_shapes_config", "enabled_custom_ops", "encoder_compilation_time", "fast_moe_cold_start",
    "full_cuda_graph", "inductor_compile_config", "inductor_passes", "ir_enable_torch_wrap", "level",
    "local_cache_dir", "max_capture_size", "max_cudagraph_capture_size", "mode", "pass_config", "splitting_ops",
    "static_all_moe_layers", "static_forward_context", "traced_files", "use_cudagraph", "use_inductor",
    "use_inductor_graph_partition",
})  # fmt: skip
"""Its other fields, which shape the language model."""


class IgnoredSetting(UserWarning):
    """A setting of another server that is taken and changes nothing here; its text says so in one line."""


def read_json(option: str, value: Any) -> dict[str, Any]:
    """A JSON object, or the mapping that a file holds."""
    found = value
    if isinstance(value, str):
        found = parse_json(value, f"{option} {_short(value)}")
    if not isinstance(found, dict):
        kind = "a mapping or its JSON text" if not isinstance(value, str) else "a JSON object"
        raise UsageError(f"{option} takes {kind}, got {_short(value)}")
    return found


def parse_processor_kwargs(value: Any) -> dict[str, Any]:
    """Overrides of a processor's settings."""
    settings = read_json("--mm-processor-kwargs", value)
    for name, entry in settings.items():
        numbers = entry.values() if isinstance(entry, Mapping) else entry if isinstance(entry, list) else [entry]
        for number in numbers:
            if isinstance(number, int | float) and not (math.isfinite(number) and 0 <= number <= MOST_TOKENS * 2**20):
                raise UsageError(f"--mm-processor-kwargs: {name} is {number!r}; it must be a finite number, at least 0")
    return settings


def parse_compilation_config(value: Any) -> dict[str, Any]:
    """Reads the encoder-graph fields of vLLM's `--compilation-config`.

    Returns:
        Those of `ENCODER_FIELDS` and of `ENABLED_FIELD` that are given.
    """
    config = read_json("--compilation-config", value)
    known = {ENABLED_FIELD, *ENCODER_FIELDS}
    others = [name for name in config if name not in known]
    for name in others:
        if name not in COMPILATION_FIELDS:
            raise UsageError(f"--compilation-config: unknown field {name!r}; {near(name, known | COMPILATION_FIELDS)}")
    if others:
        warnings.warn(
            IgnoredSetting(f"--compilation-config: {', '.join(others)} is about the language model; ignored"),
            stacklevel=2,
        )
    found = {name: config[name] for name in config if name in known and config[name] is not None}
    for name, entry in found.items():
        kind = bool if name == ENABLED_FIELD else list if name == "encoder_cudagraph_token_budgets" else int
        if not isinstance(entry, kind) or (kind is int and isinstance(entry, bool)):
            raise UsageError(f"--compilation-config: {name} is {entry!r}; it must be of type {kind.__name__}")
        if isinstance(entry, list) and not all(
            isinstance(budget, int) and not isinstance(budget, bool) for budget in entry
        ):
            raise UsageError(f"--compilation-config: token budgets must be integers, got {entry}")
    return found


def options_of_compilation_config(value: Any) -> dict[str, Any]:
    """The options that a compilation config stands for, by name."""
    fields = parse_compilation_config(value)
    is_off = fields.pop(ENABLED_FIELD, True) is False
    found = {ENCODER_FIELDS[name]: entry for name, entry in fields.items()}
    return found | {"enforce_eager": True} if is_off else found


def parse_video_limit(value: Any) -> int | None:
    """Videos of a prompt in vLLM's `--limit-mm-per-prompt`, also as `{"video": {"count": 1}}`; None is no limit."""
    if isinstance(value, int):
        return value
    found = read_json("--limit-mm-per-prompt", value).get("video")
    limit = found.get("count") if isinstance(found, dict) else found
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        raise UsageError(
            f'--limit-mm-per-prompt: video is {limit!r}; it must be an integer, for example {{"video": 0}}'
        )
    return limit


def parse_tokens(value: Any, option: str = "a number of tokens") -> int:
    """A number of tokens as vLLM reads it: 32k is 32,000 and 32K is 32,768."""
    match = _HUMAN_NUMBER.fullmatch(str(value).strip())
    if match is None or isinstance(value, bool):
        raise UsageError(f"{option} is {value!r}; it must be a number of tokens, for example 32768 or 32k")
    return int(float(match[1]) * _FACTORS[match[2]]) if "." in match[1] else int(match[1]) * _FACTORS[match[2]]


def parse_percent(value: Any) -> float:
    """Reads `2%` or `2`."""
    try:
        found = float(str(value).strip().removesuffix("%"))
    except ValueError:
        found = math.nan
    if isinstance(value, bool) or not 0.0 <= found <= 100.0:
        raise UsageError(f"{value!r} is no share in percent from 0 to 100, for example 2%")
    return found


def parse_token_budgets(value: Any) -> tuple[int, ...]:
    """Reads `512,1024,2k`, `[512, 1024]`, `512 1024`, or a list of integers."""
    if isinstance(value, str):
        parts: Sequence[Any] = value.strip().strip("[]").replace(",", " ").split()
    else:
        parts = value if isinstance(value, list | tuple) else [value]
    budgets = []
    for each in parts:
        match = _HUMAN_NUMBER.fullmatch(each) if isinstance(each, str) else None
        if (isinstance(each, str) and match is None) or not isinstance(each, str | int) or isinstance(each, bool):
            raise UsageError(
                f"--token-budgets takes a list of integers, for example 512,1024,2048; got {_short(value)}"
            )
        budgets.append(parse_tokens(each))
        if not 1 <= budgets[-1] <= MOST_TOKENS:
            raise UsageError(f"--token-budgets has {each}; a budget is from 1 to {MOST_TOKENS:,} output tokens")
    return tuple(budgets)


MOST_REQUESTS_PER_CALL = 1024
"""Requests that a call may be asked to have."""

_CALLS_RULE = "it must be a number of requests, or numbers with their shares of the calls such as 1:0.6,2:0.3,4:0.1"


def call_shares(text: str) -> dict[int, float]:
    """Reads `4`, or a mix such as `1:0.6,2:0.3,4:0.1`: the share of the calls with so many requests; they sum to 1."""
    parts = [part.strip().partition(":") for part in text.split(",")]
    shares: dict[int, float] = {}
    for number, colon, share in parts:
        try:
            requests, weight = int(number), float(share) if colon else 1.0
        except ValueError:
            raise UsageError(f"--requests-per-call is {text!r}; {_CALLS_RULE}") from None
        if not 1 <= requests <= MOST_REQUESTS_PER_CALL:
            raise UsageError(
                f"--requests-per-call {text!r} has {requests} requests a call; use 1 to {MOST_REQUESTS_PER_CALL}"
            )
        if requests in shares or (len(parts) > 1 and not colon) or not 0 < weight < math.inf:
            raise UsageError(f"--requests-per-call is {text!r}; {_CALLS_RULE}, each number once, with a positive share")
        shares[requests] = weight
    total = sum(shares.values())
    return {requests: weight / total for requests, weight in shares.items()}


def parse_requests_per_call(value: Any) -> str:
    """The text of `call_shares`, out of a command line or a file, checked."""
    text = str(value).strip()
    call_shares(text)
    return text


def parse_items(value: Any) -> tuple[Size, ...]:
    """Reads the items of a call: `336x336`, `20*336x336`, `1024x768,640x360x8`.

    Args:
        value: Width x height in pixels, x frames of a video, each with how often before a star; separated by commas.
    """
    items: list[Size] = []
    for each in str(value).split(","):
        match = _ITEM.fullmatch(each.strip().lower())
        numbers = {name: int(text) for name, text in match.groupdict().items() if text} if match else {}
        if not numbers or min(numbers.values()) < 1:
            raise UsageError(
                f"--items has {each.strip()!r}; give width x height, for example 336x336, 20*336x336 for twenty of "
                "them, or 640x360x8 for a video of eight frames"
            )
        count = numbers.get("count", 1)
        if len(items) + count > MOST_ITEMS:
            raise UsageError(f"--items names more than {MOST_ITEMS} items; give a smaller call")
        items += [(numbers["width"], numbers["height"], numbers.get("frames", 1))] * count
    return tuple(items)


def parse_names(value: Any) -> tuple[str, ...]:
    """Reads `a,b`, or a list of texts."""
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    names = tuple(str(each).strip() for each in parts if str(each).strip())
    if not names:
        raise UsageError(f"{value!r} names nothing; give one or more names, with commas between")
    return names


def parse_log_fields(value: Any) -> dict[str, str]:
    """`--fields`: the names that a log has for what describes an item."""
    found = read_json("--fields", value)
    for name, own in found.items():
        if not isinstance(own, str):
            raise UsageError(f"--fields has {name!r}: {own!r}; a field is given the name that the log has for it")
    return found


def preset_names(begun: str) -> list[str]:
    """The presets that begin so; of several names with commas, for the last one."""
    from vitgraph.models.registry import all_presets

    before, comma, last = begun.rpartition(",")
    return [f"{before}{comma}{name}" for name in all_presets() if name.startswith(last)]


def near(name: str, known: Any) -> str:
    """The known names that are like `name`, for an error; all of them where none is."""
    import difflib

    found = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(found)}?" if found else f"known: {', '.join(sorted(known))}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


# -- rules -------------------------------------------------------------------------------------------------------------


def at_least(least: int, what: str = "", most: int = MOST_COUNT) -> Rule:
    """An integer from `least` to `most`."""

    def rule(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            return f"it must be an integer of at least {least}{what}"
        return f"it must be at most {most:,}; give a smaller number" if value > most else None

    return rule


def between(least: float, most: float, what: str, open_ends: bool = False) -> Rule:
    """A finite number from `least` to `most`, said by `what`; both ends left out where they are open."""

    def rule(value: Any) -> str | None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        is_in = is_number and (least < value < most if open_ends else least <= value <= most)
        return None if is_in else f"it must be {what}"

    return rule


def one_of(*names: str) -> Rule:
    """One of these texts."""
    return lambda value: None if value in names else f"known: {', '.join(names)}"


def refuse_given(given: Mapping[str, bool], text: str) -> None:
    """Raises UsageError for the first that is given, named in the place that `text` has for it."""
    for name in [name for name, is_given in given.items() if is_given]:
        raise UsageError(text.replace("{}", name))


Buckets = dict[tuple[int, int, int], float]
"""Probability by (height, width, frames)."""

_BUCKET_OPTION = "--random-mm-bucket-config"
_BUCKET_EXAMPLE = "'{(336, 336, 1): 1.0}' or '{\"336x336x1\": 1.0}' (height, width, frames: probability)"
LIMIT_OPTION = "--random-mm-limit-mm-per-prompt"
LIMIT_EXAMPLE = '\'{"image": 3, "video": 0}\''
# vLLM takes audio limits too; they concern no item here, and a pasted limit must not fail for them.
_KNOWN_MODALITIES = (IMAGE, VIDEO, "audio")
_SIZE_TEXT = re.compile(r"\(?\s*(\d{1,9})\s*[x×,]\s*(\d{1,9})\s*[x×,]\s*(\d{1,9})\s*\)?")


def parse_buckets(value: str | Mapping[Any, Any]) -> Buckets:
    """Reads size buckets from the spelling of a Python tuple literal or from JSON.

    Args:
        value: `{(336, 336, 1): 1.0}`, `{"(336, 336, 1)": 1.0}`, `{"336x336x1": 1.0}`, or such a mapping. The order is
            height, width, frames.

    Returns:
        Probability by (height, width, frames), as given: not scaled, zeros kept.
    """
    buckets: Buckets = {}
    for key, probability in _mapping_pairs(value, _BUCKET_OPTION, _BUCKET_EXAMPLE):
        match = _SIZE_TEXT.fullmatch(str(key).strip()) if isinstance(key, str | tuple) else None
        height, width, frames = map(int, match.groups()) if match else (0, 0, 0)
        if min(height, width, frames) < 1:
            raise UsageError(
                f"{_BUCKET_OPTION}: size {key!r} must be three positive integers, height, width and frames (1 frame is "
                f"an image, more are a video), for example {_BUCKET_EXAMPLE}"
            )
        size = height, width, frames
        if size in buckets:
            raise UsageError(f"{_BUCKET_OPTION}: size {size} is given twice; name each (height, width, frames) once")
        is_number = isinstance(probability, int | float) and not isinstance(probability, bool)
        if not is_number or not math.isfinite(probability) or probability < 0:
            raise UsageError(
                f"{_BUCKET_OPTION}: probability of {size} is {probability!r}; it must be a finite number of at least "
                f"0, for example {_BUCKET_EXAMPLE}"
            )
        buckets[size] = float(probability)
    if not any(buckets.values()):
        raise UsageError(
            f"{_BUCKET_OPTION}: all probabilities of {sorted(buckets)} are 0; at least one must be above 0, "
            f"for example {_BUCKET_EXAMPLE}"
        )
    return buckets


def parse_limits(value: str | Mapping[Any, Any]) -> dict[str, int]:
    """Reads the most items of each modality in a request.

    Returns:
        Limit by modality.
    """
    limits: dict[str, int] = {}
    for key, limit in _mapping_pairs(value, LIMIT_OPTION, LIMIT_EXAMPLE):
        if key not in _KNOWN_MODALITIES:
            raise UsageError(
                f"{LIMIT_OPTION}: unknown modality {key!r}; known are {', '.join(_KNOWN_MODALITIES)}, "
                f"for example {LIMIT_EXAMPLE}"
            )
        if key in limits:
            raise UsageError(f"{LIMIT_OPTION}: {key!r} is given twice; name each modality once")
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
            raise UsageError(
                f"{LIMIT_OPTION}: limit of {key!r} is {limit!r}; it must be an integer of at least 0, "
                f"for example {LIMIT_EXAMPLE}"
            )
        limits[str(key)] = limit
    return limits


def _mapping_pairs(value: object, option: str, example: str) -> list[tuple[Any, Any]]:
    """Keys and values of a mapping or of its text, in order and with repeats, so that repeats can be refused."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, str):
        with contextlib.suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            tree = ast.parse(value.strip(), mode="eval").body
            if isinstance(tree, ast.Dict):
                keys = [None if key is None else ast.literal_eval(key) for key in tree.keys]
                pairs = list(zip(keys, map(ast.literal_eval, tree.values), strict=True))
    if not pairs:
        raise UsageError(f"{option} is {value!r}; it must be a non-empty mapping, for example {example}")
    return pairs
