"""`FLASH_ATTN`: the newest FlashAttention generation that the installed packages and the GPU allow, or a forced one.

`ROCM_AITER_FA`, AMD's aiter package, has the same varlen function; it was never run by this project, which has had no
AMD GPU.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from typing import Any, ClassVar, Self

import torch

from vitgraph.attention.base import HalfPrecisionBackend, Packed
from vitgraph.attention.padding import FILL_BYTES, zero_rows_past_end
from vitgraph.errors import BackendError

HeadShape = tuple[int, int, torch.dtype, torch.device]
"""Heads, head width, dtype and device of a call."""

Output = torch.Tensor | None
"""Where to write; None in eager calls."""

Kernel = Callable[..., torch.Tensor]
"""`(out, *packed) -> [N, H, E]`."""

SHORT_ROWS = 64
"""Segments up to this long, attention windows among them, go to generation 2 where nobody forces one. Generation 4
launches work for every unused segment slot too, of which windows have hundreds: on an H200 a replay of twenty 336x336
images took Qwen2.5-VL 67.6 ms with generation 4 and 61.4 with generation 2, whose eager call was the faster one too."""

TILES = ("64x128", "128x128")
"""Query rows and keys of a generation 4 program that `auto` measures on Hopper beside the package's own choice, which
is 192x144 for heads of 65 to 96 and leaves processors idle in small calls. On an H200 with 16 heads of 72, 64x128 is
faster by 25 to 34 % up to 448 rows, 128x128 by 16 to 20 % at 616 to 884, and none from 1,024 rows on; more keys a
tile gain no more."""

TILED_WIDTHS = range(65, 97)
"""Head widths at which those tiles are tried; the package's choice for others is of that kind already."""

LARGE_FILL_BYTES = FILL_BYTES // 2
"""Outputs above this are not filled several at once (see `GraphOutputs`), and a fill takes longer than a launch."""


class FlashAttnBackend(HalfPrecisionBackend):
    """Varlen FlashAttention; half-precision only.

    No generation writes the rows past the last segment. Generation 2 clears what it loads past a segment's end, so
    stale padding cannot reach a valid row. Generations 3 and 4 load whole tiles, and a NaN in the padding of `value`
    would turn into 0 * NaN: the padded rows of what they return are therefore finite on the graph path. Eager has no
    padding and pays nothing.

    Args:
        version: 2, 3 or 4 forces a generation; None takes the newest that runs on `device`, and beside generation 4
            generation 2 for short segments.
        device: Where it will run; None takes the current CUDA device.
        tile: One of `TILES` forces the tile of generation 4; None leaves it to the package.

    Raises:
        BackendError: The generation cannot run here.
    """

    name: ClassVar[str] = "FLASH_ATTN"
    computes: ClassVar[str] = "FlashAttention"
    has_versions: ClassVar[bool] = True

    def __init__(self, version: int | None = None, device: torch.device | None = None, tile: str | None = None) -> None:
        super().__init__()
        device = device or torch.device("cuda", torch.cuda.current_device())
        is_free = version is None
        if version is None:
            version = max(installed_generations(device), default=2)
        if version not in GENERATIONS:
            known = ", ".join(str(generation) for generation in sorted(GENERATIONS))
            raise BackendError(f"--flash-attn-version is {version}; known generations are {known}")
        generation = GENERATIONS[version]
        reason = generation.unavailable_reason(device)
        if reason is not None:
            raise BackendError(f"FlashAttention {version} cannot run on {device}: {reason}")
        self.version = version
        self._kernel, self.implementation = generation.load()
        self._tile = tile
        if tile is not None:
            rows, keys = map(int, tile.split("x"))
            self._kernel = partial(self._kernel, tile_mn=(rows, keys))
            self.implementation += f" in tiles of {tile}"
        self._short_kernel = self._kernel
        if is_free and version == 4 and GENERATIONS[2].unavailable_reason(device) is None:
            self._short_kernel, short = GENERATIONS[2].load()
            self.implementation += f"; {short} for segments of at most {SHORT_ROWS} rows"
        self.needs_finite_padding = generation.loads_whole_tiles
        self._heads_seen: set[HeadShape] = set()

    @classmethod
    def for_device(cls, device: torch.device, variant: str | None = None) -> Self:
        version, _, tile = (variant or "").partition(":")
        return cls(int(version) if version else None, device, tile or None)

    @classmethod
    def variants(cls, device: torch.device) -> tuple[str | None, ...]:
        # What is forced to generation 4 is for comparisons; its place is taken by what runs when nobody forces one.
        installed = installed_generations(device)
        plain = tuple(None if version == 4 else str(version) for version in reversed(installed))
        has_tiles = 4 in installed and torch.cuda.get_device_capability(device)[0] == 9
        return plain + tuple(f"4:{tile}" for tile in TILES if has_tiles)

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        reasons = {version: generation.unavailable_reason(device) for version, generation in GENERATIONS.items()}
        return None if None in reasons.values() else reasons[2]

    def unsupported_reason(self, head_width: int, dtype: torch.dtype) -> str | None:
        if self._tile is not None and head_width not in TILED_WIDTHS:
            return f"tiles are tried for heads of {TILED_WIDTHS[0]} to {TILED_WIDTHS[-1]}"
        return super().unsupported_reason(head_width, dtype)

    def varlen(self, *packed: *Packed) -> torch.Tensor:
        query, _, _, cu_seqlens, max_seqlen, _ = packed
        self._heads_seen.add((query.shape[1], query.shape[2], query.dtype, query.device))
        is_short = max_seqlen <= SHORT_ROWS
        kernel = self._short_kernel if is_short else self._kernel
        if not (self.is_on_graph_path and self.needs_finite_padding):
            return kernel(None, *packed)
        if (is_short and kernel is not self._kernel) or self._is_cheaper_to_clear(query):
            out = kernel(None, *packed)
            return zero_rows_past_end(out, cu_seqlens)
        return kernel(self.graph_output(query), *packed)

    @torch.inference_mode()
    def prepare(self, shapes: Iterable[tuple[int, int, int]]) -> None:
        """Generation 4 builds a kernel, in seconds, where lengths or slots fall on another side of its thresholds."""
        if self.version != 4:
            return
        started = time.perf_counter()
        classes: dict[tuple[int, int], tuple[int, int, int]] = {}
        for rows, slots, longest in sorted(shapes):
            classes.setdefault((_length_class(longest), (slots - 1).bit_length()), (rows, slots, longest))
        for heads, width, dtype, device in self._heads_seen.copy():
            for rows, slots, longest in classes.values():
                tensor = torch.zeros(rows, heads, width, dtype=dtype, device=device)
                offsets = torch.arange(slots + 1, dtype=torch.int32, device=device).mul_(longest).clamp_(max=rows)
                self.varlen(tensor, tensor, tensor, offsets, longest, width**-0.5)
        self.plan_build_ms += (time.perf_counter() - started) * 1e3

    def _is_cheaper_to_clear(self, query: torch.Tensor) -> bool:
        """Clearing the padded rows of a call's own output, instead of filling it with zeros beforehand."""
        return self.outputs.are_fresh and query.is_cuda and query.numel() * query.element_size() > LARGE_FILL_BYTES


def _length_class(longest: int) -> int:
    """Lengths between two of which no threshold of a kernel is to be expected: tiles are multiples of 64 rows."""
    return -(-longest // 64) if longest <= 512 else 8 + (longest - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of FlashAttention.

    Attributes:
        unavailable_reason: Why it cannot run on a device, with what to install.
        load: Its kernel, and what runs (for the record).
        loads_whole_tiles: Rows past a segment's end take part, with weight 0.
    """

    unavailable_reason: Callable[[torch.device], str | None]
    load: Callable[[], tuple[Kernel, str]]
    loads_whole_tiles: bool


def installed_generations(device: torch.device) -> tuple[int, ...]:
    """Generations that can run on `device`, ascending."""
    return tuple(
        version for version, generation in GENERATIONS.items() if generation.unavailable_reason(device) is None
    )


def _device_reason(device: torch.device, oldest: int) -> str | None:
    if device.type != "cuda":
        return f"FlashAttention needs a CUDA device, this is {device.type}"
    if torch.cuda.get_device_capability(device)[0] < oldest:
        return f"it needs compute capability {oldest}.0 or newer"
    return None


def _load_fa2() -> tuple[Kernel, str]:
    try:
        # The flash-attn-4 package shares the namespace of flash-attn 2, not this function.
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return _torch_fa2_kernel(), f"FlashAttention 2 in torch {torch.__version__}"
    return package_kernel(flash_attn_varlen_func), f"flash-attn {metadata.version('flash-attn')}"


def _package_reason(
    device: torch.device, package: str, module: str, gpus: Mapping[int, str], install: str
) -> str | None:
    """Why a generation that is a package of its own cannot run on `device`; None where it can.

    Args:
        device: The device.
        package: What the generation is called.
        module: The module that must import.
        gpus: Name by major compute capability of the GPUs that it has forward kernels for.
        install: How to get it.
    """
    reason = _device_reason(device, 9)
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability(device)[0] not in gpus:
        return f"{package} has kernels for {' and '.join(dict.fromkeys(gpus.values()))} only"
    try:
        import_module(module)
    except ImportError as error:
        return f"{package} does not import ({error}); {install}"
    return None


def installed_version(package: str) -> str:
    """Of a package that may have been built from its sources."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _load_fa3() -> tuple[Kernel, str]:
    from flash_attn_interface import flash_attn_varlen_func

    return package_kernel(flash_attn_varlen_func), f"flash-attn-3 {installed_version('flash_attn_3')}"


def _torch_fa2_kernel() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn

    takes_scale = "scale" in inspect.signature(varlen_attn).parameters

    def call(out: Output, *packed: *Packed) -> torch.Tensor:
        query, key, value, cu_seqlens, max_seqlen, scale = packed
        options: dict[str, Any] = {"scale": scale} if takes_scale else {}
        if not takes_scale and scale != query.shape[-1] ** -0.5:
            query = query * (scale * query.shape[-1] ** 0.5)
        result: Any = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
        return result

    return call


def package_kernel(function: Callable[..., Any]) -> Kernel:
    """The varlen function that the packages of generations 2 and 3 and aiter share by name and by these arguments."""

    def call(out: Output, *packed: *Packed) -> torch.Tensor:
        result = function(*packed[:3], **_options(*packed[3:]))
        # Some releases return the log-sum-exp beside it.
        computed = result[0] if isinstance(result, tuple | list) else result
        # Only generation 3 is given an output to keep finite, and its public function cannot write into one.
        return computed if out is None else zero_rows_past_end(computed, packed[3])

    return call


def _options(cu_seqlens: torch.Tensor, max_seqlen: int, scale: float) -> dict[str, Any]:
    """How these varlen functions are told the segments and the scale."""
    return {
        "softmax_scale": scale,
        "causal": False,
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
    }


def _load_fa4() -> tuple[Kernel, str]:
    # The public function cannot be given its output, which padding safety needs; see the class.
    from flash_attn.cute.interface import _flash_attn_fwd

    # Building a kernel warns, once a kind, of an argument that flash-attn leaves out itself.
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted to a JitArgument")

    def call(out: Output, *packed: *Packed, **options: Any) -> torch.Tensor:
        return _flash_attn_fwd(*packed[:3], **_options(*packed[3:]), out=out, **options)[0]

    return call, f"flash-attn-4 {metadata.version('flash-attn-4')}"


GENERATIONS: Mapping[int, Generation] = {
    2: Generation(partial(_device_reason, oldest=8), _load_fa2, loads_whole_tiles=False),
    3: Generation(
        partial(
            _package_reason,
            package="flash-attn 3",
            module="flash_attn_interface",
            gpus={9: "Hopper"},
            install="build it from the flash-attention repository's `hopper` folder",
        ),
        _load_fa3,
        loads_whole_tiles=True,
    ),
    4: Generation(
        partial(
            _package_reason,
            package="flash-attn-4",
            module="flash_attn.cute.interface",
            gpus={9: "Hopper", 10: "Blackwell", 11: "Blackwell"},
            install="pip install '.[flash-attn-4]' in a clone of vitgraph",
        ),
        _load_fa4,
        loads_whole_tiles=True,
    ),
}
"""The generations that a user can force, by number."""


UNTESTED = "untested: this project has not been run on an AMD GPU"


class RocmAiterBackend(HalfPrecisionBackend):
    """Eager only: that its call can be captured, and that stale padding cannot reach a valid row, was never shown."""

    name: ClassVar[str] = "ROCM_AITER_FA"
    is_capture_safe: ClassVar[bool] = False
    computes: ClassVar[str] = "aiter"

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        from aiter import flash_attn_varlen_func

        self._kernel = package_kernel(flash_attn_varlen_func)
        self.implementation = f"aiter {installed_version('aiter')} ({UNTESTED})"

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        if device.type != "cuda" or torch.version.hip is None:
            here = device.type if device.type != "cuda" else f"torch for CUDA {torch.version.cuda}"
            return f"it needs an AMD GPU and a ROCm build of torch, this is {here} ({UNTESTED})"
        try:
            from aiter import flash_attn_varlen_func  # noqa: F401
        except ImportError as error:
            return f"aiter does not import ({error}); install AMD's aiter package ({UNTESTED})"
        return None

    def varlen(self, *packed: *Packed) -> torch.Tensor:
        return self._kernel(None, *packed)
