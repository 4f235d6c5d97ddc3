"""cuDNN through flashinfer: packed offsets, buckets, plans, and a plan cache that cannot tell layouts apart.

The stand-in keeps plans as flashinfer does, by a key without strides and scale, bakes both into a plan, and computes
attention by reading memory at the offsets that it is given. Wrong offsets or a mixed-up plan give wrong numbers.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from vitgraph.attention import flashinfer
from vitgraph.attention.flashinfer import FlashInferBackend, bucketed_seqlen, bucketed_slots, offset_arguments
from vitgraph.attention.measure import AttentionCase, reference_attention, relative_error
from vitgraph.errors import BackendError, CaptureError

CPU = torch.device("cpu")
SCALE = 0.3


def offsets_at(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("slots", "bucket"),
    [(0, 8), (3, 8), (8, 8), (9, 16), (16, 16), (17, 64), (64, 64), (65, 128), (128, 128), (129, 192)],
)
def test_slots_go_to_the_next_bucket_and_above_64_to_multiples_of_it(slots: int, bucket: int) -> None:
    assert bucketed_slots(slots) == bucket


@pytest.mark.parametrize(("longest", "bound"), [(0, 256), (1, 256), (256, 256), (257, 512), (3072, 4096), (4096, 4096)])
def test_length_bounds_are_powers_of_two(longest: int, bound: int) -> None:
    assert bucketed_seqlen(longest) == bound


def values(arguments: dict[str, torch.Tensor], name: str) -> list[int]:
    assert arguments[name].shape[1:] == (1, 1, 1)
    assert arguments[name].dtype == torch.int32
    return arguments[name].flatten().tolist()


def test_offsets_are_padded_with_their_own_last_value_and_unused_slots_have_no_rows() -> None:
    """Query and value of a fused projection have different row strides; three items in a bucket of eight."""
    found = offset_arguments(offsets_at(0, 4, 10, 18), 8, (1152, 3456, 1152, 1152), rows=18)
    narrow, wide = [0, 4608, 11520] + [20736] * 6, [0, 13824, 34560] + [62208] * 6
    assert [values(found, f"batch_offsets_{name}") for name in "qkvo"] == [narrow, wide, narrow, narrow]
    for name in ("actual_seq_lens_q", "actual_seq_lens_kv"):
        assert values(found, name) == [4, 6, 8, 0, 0, 0, 0, 0]


def test_offsets_that_fill_their_slots_are_as_they_are() -> None:
    found = offset_arguments(offsets_at(*range(9)), 8, (1, 1, 1, 1), rows=8)
    assert values(found, "batch_offsets_q") == list(range(9))


def test_offsets_beyond_32_bits_are_refused_and_not_wrapped() -> None:
    with pytest.raises(BackendError, match="above 32 bits"):
        offset_arguments(offsets_at(0, 700_000), 8, (3456, 1, 1, 1), rows=700_000)


def test_arguments_follow_offsets_that_change_under_the_same_tensor() -> None:
    """Equal totals with other boundaries: nothing of the first call may be left."""
    static = offsets_at(0, 4, 10, 18)
    offset_arguments(static, 8, (2, 2, 2, 2), rows=18)
    static.copy_(offsets_at(0, 5, 10, 18))
    changed = offset_arguments(static, 8, (2, 2, 2, 2), rows=18)
    assert values(changed, "actual_seq_lens_q")[:3] == [5, 5, 8]
    assert values(changed, "batch_offsets_q")[:4] == [0, 10, 20, 36]


class Plan:
    """Strides and scale as they were when it was built."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], scale: float, workspace: int) -> None:
        self.strides = [tensor.stride() for tensor in tensors]
        self.scale = scale
        self.workspace = workspace

    def get_workspace_size(self) -> int:
        return self.workspace


class Prefill(ModuleType):
    """Stands in for `flashinfer.cudnn.prefill`."""

    def __init__(self) -> None:
        super().__init__("flashinfer.cudnn.prefill")
        self.plans: dict[tuple[Any, ...], Plan] = {}
        self.built: list[tuple[Any, ...]] = []
        self.calls: list[dict[str, Any]] = []
        self.workspace = 1024
        self.refuses = ""

    def _build_prefill_graph(self, *, q: Any, k_cache: Any, v_cache: Any, scale: float, **options: Any) -> Any:
        if self.refuses:
            raise ValueError(self.refuses)
        slots = options["actual_seq_lens_q"].shape[0]
        key = (slots, q.dtype, options["max_token_seq_q"], options["max_sequence_kv"], q.shape[1:], v_cache.shape[1:])
        if key not in self.plans:
            self.built.append((slots, options["max_token_seq_q"]))
            self.plans[key] = Plan((q, k_cache, v_cache), scale, self.workspace)
        return self.plans[key], []

    def cudnn_batch_prefill_with_kv_cache(
        self, q: Any, k: Any, v: Any, scale: float, workspace: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        self.calls.append(options)
        bound = options["max_token_per_sequence"]
        before = len(self.built)
        plan, _ = self._build_prefill_graph(q=q, k_cache=k, v_cache=v, scale=scale, max_token_seq_q=bound, **options)
        assert len(self.built) == before, "a plan was built in the call itself"
        assert workspace.numel() >= plan.workspace
        out = options["out"]
        names = ("batch_offsets_q", "batch_offsets_k", "batch_offsets_v", "batch_offsets_o")
        starts = [options[name].flatten().tolist() for name in names]
        for slot, length in enumerate(options["actual_seq_lens_q"].flatten().tolist()):
            assert length <= bound
            if length:
                shape = (length, *q.shape[1:])
                query, key, value = (
                    torch.as_strided(tensor, shape, stride, tensor.storage_offset() + offsets[slot])
                    for tensor, stride, offsets in zip((q, k, v), plan.strides, starts, strict=False)
                )
                whole = torch.tensor([0, length])
                target = torch.as_strided(out, shape, out.stride(), out.storage_offset() + starts[3][slot])
                target.copy_(reference_attention(query, key, value, whole, plan.scale))
        return out, None


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> Prefill:
    """The stand-in in place, as on a Hopper GPU, with a fresh process' memory of layouts."""
    module = Prefill()
    packages = {"flashinfer": ModuleType("flashinfer"), "flashinfer.cudnn": ModuleType("flashinfer.cudnn")}
    packages["flashinfer.cudnn"].prefill = module  # type: ignore[attr-defined]
    cudnn = ModuleType("cudnn")
    cudnn.backend_version = lambda: 91900  # type: ignore[attr-defined]
    for name, package in {**packages, "flashinfer.cudnn.prefill": module, "cudnn": cudnn}.items():
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(flashinfer.metadata, "version", lambda _: "0.6.13")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(flashinfer, "_LAYOUTS", {})
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 4096)
    return module


def run(backend: FlashInferBackend, case: AttentionCase, tensors: Any = None, scale: float = SCALE) -> float:
    """Relative error of one call."""
    query, key, value = tensors or case.tensors(CPU)
    offsets = case.offsets(CPU)
    out = backend.varlen(query, key, value, offsets, max(case.lengths), scale)
    return relative_error(out, reference_attention(query, key, value, offsets, scale, torch.float64), offsets)


def case_of(*lengths: int, slots: int = 0, padding_rows: int = 0) -> AttentionCase:
    return AttentionCase(2, 8, torch.float32, lengths, slots, padding_rows)


def test_ragged_segments_with_empty_slots_are_right(prefill: Prefill) -> None:
    backend = FlashInferBackend(CPU)
    assert run(backend, case_of(4, 0, 6, 8, slots=5)) < 1e-6
    (call,) = prefill.calls
    assert call["actual_seq_lens_q"].flatten().tolist() == [4, 0, 6, 8, 0, 0, 0, 0]
    assert call["batch_offsets_o"].flatten().tolist() == [0, 64, 64, 160, 288, 288, 288, 288, 288]
    assert call["batch_offsets_o"].shape == (9, 1, 1, 1)
    assert (call["causal"], call["return_lse"]) == (False, False)


def test_items_of_one_bucket_share_one_plan(prefill: Prefill) -> None:
    backend = FlashInferBackend(CPU)
    for items in (8, 9, 64, 65, 8, 9, 64, 65, 3):
        assert run(backend, case_of(*(2,) * items)) < 1e-6
    assert prefill.built == [(8, 256), (16, 256), (64, 256), (128, 256)]
    assert len(backend._plans) == 4
    assert backend.plan_build_ms > 0


def test_longer_segments_get_a_plan_of_the_next_bound(prefill: Prefill) -> None:
    backend = FlashInferBackend(CPU)
    for length in (200, 256, 257, 300):
        assert run(backend, case_of(length)) < 1e-6
    assert prefill.built == [(8, 256), (8, 512)]


def test_layouts_and_scales_that_the_plan_cache_takes_for_one_are_kept_apart(prefill: Prefill) -> None:
    """flashinfer's key has neither strides nor scale: the second call would silently use the first one's."""
    backend, case = FlashInferBackend(CPU), case_of(5, 7)
    query, key, value = case.tensors(CPU)
    fused = torch.stack((query, key, value), dim=1)
    views = tuple(fused[:, index] for index in range(3))
    for tensors in ((query, key, value), views, (query, key, views[2]), (query, key, value)):
        for scale in (SCALE, 0.05):
            assert run(backend, case, tensors, scale) < 1e-6
    assert len(prefill.built) == 6
    another = FlashInferBackend(CPU)
    assert run(another, case, views, 0.05) < 1e-6
    assert len(prefill.built) == 6, "the plans are the process', not the object's"


def test_offsets_that_change_in_place_are_followed(prefill: Prefill) -> None:
    backend, case = FlashInferBackend(CPU), case_of(4, 6, 8)
    query, key, value = case.tensors(CPU)
    static = case.offsets(CPU)
    for lengths in ((4, 6, 8), (5, 5, 8)):
        offsets = case_of(*lengths).offsets(CPU)
        static.copy_(offsets)
        with backend.one_forward():
            layers = [backend.varlen(query, key, value, static, 8, SCALE) for _ in range(2)]
        expected = reference_attention(query, key, value, offsets, SCALE)
        assert all(relative_error(out, expected, offsets) < 1e-6 for out in layers)


def test_one_forward_derives_offsets_once_and_two_sets_of_offsets_apart(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    derived: list[int] = []
    real = flashinfer.offset_arguments

    def count(*arguments: Any) -> Any:
        derived.append(1)
        return real(*arguments)

    monkeypatch.setattr(flashinfer, "offset_arguments", count)
    backend = FlashInferBackend(CPU)
    full, windows = case_of(12), case_of(4, 4, 4)
    run(backend, full)
    run(backend, windows)
    derived.clear()
    tensors = full.tensors(CPU)
    offsets = [full.offsets(CPU), windows.offsets(CPU)]
    with backend.one_forward():
        for layer in range(6):
            out = backend.varlen(*tensors, offsets[layer % 2], 12, SCALE)
            expected = reference_attention(*tensors, offsets[layer % 2], SCALE)
            assert relative_error(out, expected, offsets[layer % 2]) < 1e-6
    assert len(derived) == 2
    backend.varlen(*tensors, offsets[0], 12, SCALE)
    assert len(derived) == 3, "nothing is kept past the forward"


def test_plans_of_calls_to_come_are_built_ahead(prefill: Prefill) -> None:
    backend = FlashInferBackend(CPU)
    run(backend, case_of(3))
    backend.prepare([(100, 9, 300), (100, 3, 200), (90, 12, 400)])
    assert prefill.built == [(8, 256), (16, 512)]
    run(backend, case_of(*(1,) * 8, 300))
    assert len(prefill.built) == 2


def test_a_plan_is_never_built_inside_a_capture(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="built inside a capture; run the forward once before"):
        run(FlashInferBackend(CPU), case_of(3))


def test_padded_rows_of_a_graph_are_finite(prefill: Prefill) -> None:
    backend, case = FlashInferBackend(CPU), case_of(3, 2, padding_rows=4)
    query, key, value = case.tensors(CPU)
    with backend.graph_path():
        out = backend.varlen(query, key, value, case.offsets(CPU), 3, SCALE)
    assert out[5:].abs().sum() == 0


def test_a_plan_that_needs_more_workspace_gets_it_and_the_old_one_is_kept(prefill: Prefill) -> None:
    backend = FlashInferBackend(CPU)
    run(backend, case_of(3))
    before = backend._workspace
    prefill.workspace = 9000
    run(backend, case_of(*(1,) * 9))
    assert backend._workspace.numel() == 9000
    assert backend._old_workspaces == [before]


def test_heads_without_a_plan_are_refused_by_name(prefill: Prefill) -> None:
    prefill.refuses = "no engine"
    with pytest.raises(BackendError, match=r"no plan for 2 heads of width 8 .* no engine; use another"):
        run(FlashInferBackend(CPU), case_of(3))


def test_the_record_names_both_libraries(prefill: Prefill) -> None:
    assert FlashInferBackend(CPU).implementation == "cuDNN 91900 prefill through flashinfer-python 0.6.13"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("package", r"pip install '.\[flashinfer\]'"),
        ("function", "has no _build_prefill_graph"),
        ("cudnn", "cuDNN 91001 has a known attention bug"),
        ("gpu", "compute capability 9.0"),
    ],
)
def test_what_is_missing_is_named(change: str, message: str, prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert FlashInferBackend.unavailable_reason(gpu) is None
    if change == "package":
        monkeypatch.setitem(sys.modules, "flashinfer.cudnn", None)
    elif change == "function":
        monkeypatch.setattr(sys.modules["flashinfer.cudnn"], "prefill", ModuleType("prefill"))
        monkeypatch.setattr(
            sys.modules["flashinfer.cudnn"].prefill, "cudnn_batch_prefill_with_kv_cache", 1, raising=False
        )
    elif change == "cudnn":
        monkeypatch.setattr(sys.modules["cudnn"], "backend_version", lambda: 91001)
    else:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (8, 0))
    assert message.replace("\\", "") in str(FlashInferBackend.unavailable_reason(gpu))


def test_dtypes_and_widths_that_it_does_not_take(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FlashInferBackend(CPU)
    assert backend.unsupported_reason(72, torch.bfloat16) is None
    assert "float32" in str(backend.unsupported_reason(72, torch.float32))
    assert "multiple of 8 up to 256" in str(backend.unsupported_reason(84, torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (10, 0))
    assert "up to 128" in str(FlashInferBackend(CPU).unsupported_reason(256, torch.bfloat16))


def test_a_graph_within_a_forward_writes_to_no_output_of_that_forward(prefill: Prefill) -> None:
    """Compiled towers get several zeroed outputs at once; one that a timed graph took would be freed before it."""
    backend = FlashInferBackend(CPU)
    backend.outputs.are_fresh = True
    query = torch.ones(4, 2, 8)
    with backend.graph_path(), backend.one_forward():
        first = backend.graph_output(query)
        with backend.one_forward():
            inner = backend.graph_output(query)
        second = backend.graph_output(query)
    addresses = [out.untyped_storage().data_ptr() for out in (first, inner, second) if out is not None]
    assert addresses[0] == addresses[2] != addresses[1]
