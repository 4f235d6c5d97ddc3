"""Regional compilation: the repeated block once, traced around attention, not into it; where its code is kept between
runs, and what compiling took."""

from __future__ import annotations

import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import library

from vitgraph.attention.base import AttentionBackend, register_with_transformers, transformers_function
from vitgraph.errors import ModelError
from vitgraph.models.base import EncoderInputs
from vitgraph.planning.budgets import GraphKey

if TYPE_CHECKING:
    from vitgraph.models.encoder import VisionEncoder
    from vitgraph.models.fusions import FusingCompiler

_BACKENDS: dict[str, AttentionBackend] = {}
"""Backends that compiled blocks call, by the name that their operator is given."""

_OPERATORS = library.Library("vitgraph", "FRAGMENT")


def _define(schema: str, compute: Callable[..., torch.Tensor], example: Callable[..., torch.Tensor]) -> Any:
    """Makes an operator; without torch's `custom_op`, whose every call costs 5 us more on the host."""
    name = schema.partition("(")[0]
    _OPERATORS.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _OPERATORS.impl(name, compute, device)
    library.register_fake(f"{_OPERATORS.ns}::{name}", example, lib=_OPERATORS)
    return getattr(getattr(torch.ops, _OPERATORS.ns), name).default


varlen_attention = _define(
    "varlen_attention(str backend, Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, SymInt max_seqlen, "
    "float scale) -> Tensor",
    lambda backend, *packed: _BACKENDS[backend].varlen(*packed),
    lambda _, query, key, value, *rest: query.new_empty((*query.shape[:2], value.shape[2])),
)
dense_attention = _define(
    "dense_attention(str backend, Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor",
    lambda backend, *tiles: _BACKENDS[backend].dense(*tiles).contiguous(),
    lambda _, query, key, value, *rest: query.new_empty((*query.transpose(1, 2).shape[:3], value.shape[3])),
)


def register_opaque(backend: AttentionBackend) -> str:
    """Makes the operator form of a backend known to transformers.

    Returns:
        The attention implementation that a tower is set to before its blocks are compiled.
    """
    name, implementation = backend.name, f"{backend.transformers_name}_opaque"
    _BACKENDS[name] = backend
    # The compiler may reuse the memory of what an operator returns, so layers must not share one output.
    backend.outputs.are_fresh = True
    attend = transformers_function(partial(varlen_attention, name), partial(dense_attention, name))
    register_with_transformers(implementation, attend)
    return implementation


RECOMPILE_LIMIT = 32
YOUNGEST_DAMAGED_S = 10.0

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
SWITCH_VARIABLES = ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE")
"""torch's own caches of compiled graphs; a value that the environment has already is left as it is."""

SAMPLE_MULTIPLES = (8, 12)
"""Smallest items in the calls that trigger the compilation. Two lengths, since torch takes the first for a constant
where it may, and compiles again for a second."""


class CompileClock:
    """Wall clock that torch's compiler took in this process since `reset`, and how often it was called; one compilation
    is expected for each kind of block."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts anew; also after `torch._dynamo.reset`, which forgets who listens."""
        from torch._dynamo.callback import callback_handler

        if self._start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)
        self.seconds = 0.0
        self.compilations = 0
        self._started: float | None = None
        self._counted_before = _cache_counts()

    def cache_counts(self) -> dict[str, int]:
        """Hits and misses in torch's cache of compiled graphs since `reset`."""
        return {name: count - self._counted_before[name] for name, count in _cache_counts().items()}

    def _start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def _end(self, *_: Any) -> None:
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
            self.compilations += 1
            self._started = None


_clock: CompileClock | None = None
_compiler: FusingCompiler | None = None


def _cache_counts() -> dict[str, int]:
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return {"hits": found["fxgraph_cache_hit"], "misses": found["fxgraph_cache_miss"]}


def default_cache_folder() -> Path:
    """Where compiled code is kept unless the environment says otherwise; torch's own default is a temporary folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vitgraph" / "compiled"


def use_disk_cache() -> Path | None:
    """Switches torch's caches of compiled code on and points them at a folder that outlives the run; None where none
    can be written, and torch's temporary default is used."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    for name in SWITCH_VARIABLES:
        os.environ.setdefault(name, "1")
    given = os.environ.get(CACHE_VARIABLE)
    # Importing parts of torch writes its default into the environment, so that one is nobody's wish.
    if given and Path(given) == Path(default_cache_dir()).absolute():
        given = None
    folder = Path(given) if given else default_cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return None
        _drop_cut_off_libraries(folder)
    except (OSError, RuntimeError):
        # A read-only or missing home must not stop a run that needs no cache.
        return None
    os.environ[CACHE_VARIABLE] = str(folder)
    return folder


def _drop_cut_off_libraries(folder: Path) -> None:
    """Removes libraries that a killed run left unfinished, which torch would load; it builds missing ones again."""
    for built in folder.rglob("*.so"):
        about = built.stat()
        with built.open("rb") as file:
            head = file.read(64)
        end = 64
        if len(head) == 64 and head[:5] == b"\x7fELF\x02":
            # The table of sections, which linkers write last.
            offset, entry_bytes, entries = struct.unpack("<40xQ10xHH2x", head)
            end = offset + entry_bytes * entries
        # A younger one may be another process's, which is at work on it.
        if about.st_size < end and time.time() - about.st_mtime > YOUNGEST_DAMAGED_S:
            built.unlink(missing_ok=True)


def compile_blocks(encoder: VisionEncoder) -> int:
    """Sets the tower's repeated block to compile: once, for any length, shared by all layers, budgets and eager.

    Returns:
        How many blocks were set to compile; their first run compiles them.

    Raises:
        ModelError: The family names no repeated block.
    """
    from vitgraph.models.fusions import CompiledBlockRunner, FusingCompiler
    from vitgraph.models.loading import set_implementation

    blocks = encoder.repeated_blocks()
    if not blocks:
        raise ModelError(f"{type(encoder).__name__} names no repeated block to compile; leave --compile out")
    use_disk_cache()
    # Towers with several kinds of blocks and shapes need more variants than torch allows by default.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    set_implementation(encoder.modules, register_opaque(encoder.attention))
    global _clock, _compiler
    if _clock is None:
        _clock = CompileClock()
    _clock.reset()
    _compiler = FusingCompiler()
    for block in blocks:
        block.compile(backend=_compiler, dynamic=True)
    encoder.run_block = CompiledBlockRunner(_compiler, blocks, encoder.block_scale)
    for name in encoder.compiled_functions:
        setattr(encoder, name, torch.compile(getattr(encoder, name), backend=_compiler, dynamic=True))
    return len(blocks)


def compile_facts() -> dict[str, Any]:
    """What compiling has taken since `compile_blocks`, for the record: `seconds`, `compilations`, `cache` (`hits` and
    `misses`), `cache_dir` and `fusions`; empty where nothing was set to compile."""
    if _clock is None or _compiler is None:
        return {}
    return {
        "seconds": _clock.seconds,
        "compilations": _clock.compilations,
        "cache": _clock.cache_counts(),
        "cache_dir": os.environ.get(CACHE_VARIABLE),
        "fusions": asdict(_compiler),
    }


def sample_calls(encoder: VisionEncoder) -> Iterator[tuple[EncoderInputs, str]]:
    """Small calls that reach every path of an encoder, with the path; their pixels are random."""
    config = encoder.get_encoder_cudagraph_config()
    axis_key = tuple(value for axis in config.axes for value in axis.keys[0])
    for path, policy in config.paths.items():
        for multiple in SAMPLE_MULTIPLES:
            capacity = GraphKey(path, multiple * policy.min_token_budget, multiple, axis_key)
            items = encoder.dummy_items(capacity)
            rows: Counter[str] = Counter()
            for item in items:
                rows.update(encoder.rule.pixel_rows(item))
            yield encoder.make_inputs(items, encoder.random_pixels(rows, 0)), path


@torch.inference_mode()
def compile_encoder(encoder: VisionEncoder) -> dict[str, Any]:
    """Sets the blocks of an encoder to compile, and compiles them by running it on small calls; `compile_facts`, and
    how many `blocks` there are.

    Raises:
        ModelError: The family names no repeated block.
    """
    blocks = compile_blocks(encoder)
    for inputs, path in sample_calls(encoder):
        encoder.encoder_eager_forward(inputs, path)
    return {**compile_facts(), "blocks": blocks}
