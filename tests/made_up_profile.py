"""A profile record as a GPU would give it, with made-up times, for the tests of its table and plot."""

from __future__ import annotations

from typing import Any

from vitgraph.measure.trace import TracedKernel, summarize_traces, trace_of_kernels

GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_bias_TNT"
FLASH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<96, 64, 64, 4, false, false>>"
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int, float)"
GELU = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>"
COPY = "Memcpy DtoD (Device -> Device)"


def made_up_mode(gap_us: float, wall_ms: float) -> dict[str, Any]:
    """Twenty layers of five kernels, each `gap_us` after the one before."""
    kernels, now = [], 0.0
    for _ in range(20):
        for name, time_us in ((NORM, 10.0), (GEMM, 200.0), (FLASH, 120.0), (GELU, 30.0), (COPY, 5.0)):
            kernels.append(TracedKernel(name, now, time_us))
            now += time_us + gap_us
    return {"wall_ms": wall_ms, **summarize_traces([trace_of_kernels(kernels)])}


def made_up_profile() -> dict[str, Any]:
    """One call of twenty images on a GPU."""
    return {
        "settings": {"model": {"model": "org/some-tower"}, "repeats": 5},
        "environment": {"device": "NVIDIA H200", "compiled_blocks": 0},
        "call": {
            "items": [[336, 336, 1]] * 20 + [[640, 360, 8]],
            "tokens": 2100,
            "input_rows": 8400,
            "replays": [{"path": "default", "token_budget": 2100, "segment_slots": 32}],
            "eager_items": 0,
        },
        "traced": "GPU kernels",
        "speed_of_light": {
            "matrix_rate_tflops": 788.0,
            "total_ms": 4.5,
            "product_ms": 3.5,
            "attention_ms": 1.0,
        },
        "modes": {"eager": made_up_mode(95.0, 17.5), "graph": made_up_mode(1.0, 7.6)},
        "trace_files": [],
    }
