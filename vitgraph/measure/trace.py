"""Traces calls with torch's profiler: when the GPU is busy, and what its kernels do; on a CPU, operators instead.

What a kernel does is told by its name. The rules are tried in order and the first that matches decides, because names
nest: an attention kernel of CUTLASS also says `cutlass`, a copy of torch runs in an `elementwise_kernel`. A compiled
kernel (`triton_poi_fused_…`) is named after the operators that were fused into it, and is what the heaviest of them is.
What no rule knows is `other`, and a report lists it by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from vitgraph.measure.series import synchronize

ATTENTION, PRODUCT, NORM, ELEMENTWISE, COPY, OTHER = "attention", "product", "norm", "element-wise", "copy", "other"
KINDS = (ATTENTION, PRODUCT, NORM, ELEMENTWISE, COPY, OTHER)

_RULES = {
    ATTENTION: (
        r"flash|fmha|sdpa|attention|attn"  # FlashAttention 2 to 4, memory-efficient, cuDNN's, torch's operators
        r"|prefillwith|mergestates"  # FlashInfer
        r"|softmax"  # the parts of attention that is not fused
        r"|varlen_forward"  # this project's Triton kernel
    ),
    PRODUCT: (
        r"gemm|gemv|nvjet|cutlass|xmma|splitkreduce|wgrad|cublas"  # cuBLAS, cuBLASLt, CUTLASS
        r"|convolve|convolution|conv[123]d|implicit_|winograd"  # convolutions are products too
        r"|triton_tem_"  # matrix templates of the compiler
        r"|^aten::(_?addmm|mm|bmm|baddbmm|matmul|linear|dot|mv|_addmm_activation)$|mkldnn_linear|mkl_linear|mkldnn_(conv|rnn)"
    ),
    NORM: (
        r"layer_?norm|rms_?norm|batch_?norm|group_?norm|rowwisemoments|welford"
        r"|meanops|rsqrt|^aten::(mean|var_mean)$"  # of a norm spelled out; its products count as element-wise
    ),
    COPY: (
        r"^memcpy|^memset|memcpy32|copy_kernel|copyfunctor|_copy_kernel|fillfunctor|fill_kernel"
        r"|catarraybatchedcopy|cat_kernel|(?<!all)(?<!all_)gather|(?<!reduce)(?<!reduce_)scatter|index_?select|index_elementwise|index_put|embedding"
        r"|nchwtonhwc|nhwctonchw|transpose|permute|tensortransform"
        r"|^aten::(copy_|_to_copy|clone|cat|contiguous|fill_|zero_|index|index_select|embedding|_foreach_copy_|stack"
        r"|gather|repeat|constant_pad_nd|split_with_sizes_copy)$"
    ),
    ELEMENTWISE: (
        r"elementwise|gelu|silu|relu|sigmoid|rotary|rope|reduce_kernel|reduction_kernel|pointwise|multi_tensor_apply"
        r"|softplus|tanh|act_and_mul"
        r"|^aten::(add|sub|mul|div|neg|cos|sin|pow|sqrt|exp|abs|sum|var|max|min|maximum|minimum|clamp"
        r"|where|erf|reciprocal|lt|le|gt|ge|eq|ne|addcmul|lerp|masked_fill|quick_gelu)_?$"
    ),
}
_PATTERNS = {kind: re.compile(rule, re.IGNORECASE) for kind, rule in _RULES.items()}

_FUSED = re.compile(r"^(?:triton_(?:poi|red|per|spl)|cpp)_fused_(?P<operators>.*?)(?:_\d+)?$")
_FUSED_NORM = re.compile(r"native_layer_norm|rms_norm|(?:mean|var_mean|sum).*rsqrt|rsqrt.*(?:mean|var_mean|sum)")
_FUSED_COPY = re.compile(
    r"(?<![a-z])("
    r"_unsafe_view|_to_copy|as_strided|constant_pad_nd|convert_element_type|index_select|split_with_sizes"
    r"|slice_scatter|select_scatter|unsqueeze|transpose|permute|reshape|embedding|squeeze|unbind|expand"
    r"|select|clone|stack|slice|split|index|zeros|copy|full|view|cat"
    r")(?![a-z])"
)
"""Operators that move data and compute nothing; longer names first, since some contain others."""


def kernel_kind(name: str) -> str:
    """What a kernel or an operator does.

    Returns:
        One of `KINDS`.
    """
    fused = _FUSED.match(name)
    if fused is not None:
        return _fused_kind(fused["operators"])
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(name)), OTHER)


def _fused_kind(operators: str) -> str:
    """Kind of a compiled kernel from the names of its operators, which are joined by underscores."""
    if _FUSED_NORM.search(operators):
        return NORM
    if re.search(r"softmax|flex_attention", operators):
        return ATTENTION
    return ELEMENTWISE if _FUSED_COPY.sub("", operators).strip("_") else COPY


TOP_KERNELS = 15


@dataclass(frozen=True, slots=True)
class TracedKernel:
    """One kernel or copy on a GPU, or the own part of one operator on a CPU.

    Attributes:
        start_us: Start, on any clock.
        time_us: How long it ran; an operator without the operators that it calls.
    """

    name: str
    start_us: float
    time_us: float


@dataclass(frozen=True, slots=True)
class CallTrace:
    """What ran during one call.

    Attributes:
        kernels: Everything that ran, in any order.
        busy_us: Time in which at least one of them ran.
        span_us: From the start of the first to the end of the last.
    """

    kernels: tuple[TracedKernel, ...]
    busy_us: float
    span_us: float


def trace_of_kernels(kernels: Sequence[TracedKernel]) -> CallTrace:
    """A trace of kernels that may overlap, as on a GPU."""
    busy, end = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        stop = kernel.start_us + kernel.time_us
        busy += max(0.0, stop - max(end, kernel.start_us))
        end = max(end, stop)
    start = min((kernel.start_us for kernel in kernels), default=0.0)
    return CallTrace(tuple(kernels), busy, end - start if kernels else 0.0)


@dataclass(frozen=True, slots=True)
class BusyTime:
    """What a profiler trace says of one call, averaged over its repeats.

    Attributes:
        busy_ms: Time in which at least one kernel or copy ran.
        span_ms: From the start of the call's first kernel to the end of its last; None where the trace does not split
            evenly into the repeats. Both come from one trace, so a change of clocks cancels in their ratio.
        kernels: Kernels and copies.
    """

    busy_ms: float
    span_ms: float | None
    kernels: int

    @classmethod
    def of(cls, kernels: Sequence[TracedKernel], repeats: int) -> BusyTime | None:
        """Of kernels in order of their starts; None without any."""
        if not kernels:
            return None
        per_repeat, rest = divmod(len(kernels), repeats)
        parts = [] if rest else [kernels[i : i + per_repeat] for i in range(0, len(kernels), per_repeat)]
        span_us = sum(trace_of_kernels(part).span_us for part in parts)
        busy_ms = trace_of_kernels(kernels).busy_us / repeats / 1e3
        return cls(busy_ms, span_us / repeats / 1e3 if parts else None, round(len(kernels) / repeats))


def busy_time(call: Callable[[], object], device: torch.device, repeats: int) -> BusyTime | None:
    """GPU-busy time of a call, from one trace of all repeats; None on a CPU, or where the profiler saw nothing."""
    if device.type != "cuda":
        return None
    kernels = _kernels(_profiled(call, device, [ProfilerActivity.CUDA], repeats).events() or ())
    return BusyTime.of(sorted(kernels, key=lambda kernel: kernel.start_us), repeats)


def trace_calls(call: Callable[[], object], device: torch.device, repeats: int) -> list[CallTrace]:
    """Traces a call several times, each in a trace of its own.

    Only the device is traced on a GPU, which leaves the host its speed: the gaps between kernels are those of a call
    that nobody watches. On a CPU every operator is watched, so the gaps hold the profiler's own work too.
    """
    is_cuda = device.type == "cuda"
    trace = partial(_profiled, call, device, [ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU])
    # The profiler's first trace in a process sets it up, and may miss kernels.
    events = [trace().events() or () for _ in range(repeats + 1)][1:]
    return [trace_of_kernels(_kernels(each)) if is_cuda else _cpu_trace(each) for each in events]


def save_chrome_trace(call: Callable[[], object], device: torch.device, path: Path) -> None:
    """Writes one call, host and device, in the format of chrome://tracing and Perfetto."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    _profiled(call, device, activities)
    _profiled(call, device, activities).export_chrome_trace(str(path))


def _profiled(call: Callable[[], object], device: torch.device, activities: Sequence[Any], repeats: int = 1) -> Any:
    """The profiler after some runs of a call, each of which has ended on the device."""
    synchronize(device)
    # There is one cycle, and without the last argument torch warns that it keeps no other.
    with profile(activities=list(activities), acc_events=True) as profiler:
        for _ in range(repeats):
            call()
            synchronize(device)
    return profiler


def _kernels(events: Sequence[Any]) -> list[TracedKernel]:
    """What ran on the device; annotations, as compiled code makes them, span kernels there and are none themselves."""
    return [
        TracedKernel(event.name, event.time_range.start, event.time_range.end - event.time_range.start)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def _cpu_trace(events: Sequence[Any]) -> CallTrace:
    operators = tuple(
        TracedKernel(event.name, event.time_range.start, event.self_cpu_time_total)
        for event in events
        if event.self_cpu_time_total > 0
    )
    start = min((event.time_range.start for event in events), default=0.0)
    end = max((event.time_range.end for event in events), default=0.0)
    return CallTrace(operators, sum(operator.time_us for operator in operators), end - start)


def summarize_traces(traces: Sequence[CallTrace], untraced_ms: float = math.inf) -> dict[str, Any]:
    """Mean of some traces of the same call, in milliseconds.

    Args:
        untraced_ms: Wall clock of the same call without tracing, which puts gaps of its own between short kernels:
            where it is shorter than the traces' span, it is the span.

    Returns:
        `kernels` (how many), `busy_ms`, `span_ms`, `gap_ms` (span without busy), `kinds` (`ms` and `kernels` of each
        of `KINDS`; where kernels overlap they add up to more than `busy_ms`) and `top`, the names that took longest.
    """
    count = len(traces)
    kinds: dict[str, dict[str, float]] = {kind: {"ms": 0.0, "kernels": 0.0} for kind in KINDS}
    names: dict[str, dict[str, Any]] = {}
    for trace in traces:
        for kernel in trace.kernels:
            kind = kernel_kind(kernel.name)
            named = names.setdefault(kernel.name, {"name": kernel.name, "kind": kind, "ms": 0.0, "kernels": 0.0})
            for entry in (kinds[kind], named):
                entry["ms"] += kernel.time_us / 1e3 / count
                entry["kernels"] += 1 / count
    busy = sum(trace.busy_us for trace in traces) / count / 1e3
    span = max(busy, min(untraced_ms, sum(trace.span_us for trace in traces) / count / 1e3))
    return {
        "kernels": sum(len(trace.kernels) for trace in traces) / count,
        "busy_ms": busy,
        "span_ms": span,
        "gap_ms": span - busy,
        "kinds": kinds,
        "top": sorted(names.values(), key=lambda entry: -entry["ms"])[:TOP_KERNELS],
    }
