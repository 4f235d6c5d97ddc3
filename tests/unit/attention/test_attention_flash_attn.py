"""Which FlashAttention runs, what it is called with, and that padded rows are finite where a generation needs it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from vitgraph.attention import flash_attn
from vitgraph.attention.flash_attn import SHORT_ROWS, TILES, FlashAttnBackend, installed_generations
from vitgraph.errors import BackendError

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
OFFSETS = torch.tensor([0, 2, 3, 3], dtype=torch.int32)


def ones(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of one head of 8."""
    return torch.ones(rows, 1, 8), torch.ones(rows, 1, 8), torch.ones(rows, 1, 8)


class Recorder:
    """Stands in for a package's varlen function; leaves NaN past the last segment, as none of them writes there."""

    def __init__(self, returns_tuple: bool) -> None:
        self.calls: list[dict[str, Any]] = []
        self.returns_tuple = returns_tuple

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        self.calls.append(options)
        out = value.clone()
        out[int(options["cu_seqlens_q"][-1]) :] = float("nan")
        return (out, None) if self.returns_tuple else out


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU without any FlashAttention package."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(flash_attn.metadata, "version", lambda name: f"9.9 of {name}")


def install(monkeypatch: pytest.MonkeyPatch, module: str, **names: Any) -> None:
    """Puts a module with those names in place, and its packages above it."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        if sys.modules.get(name) is None:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, value in names.items():
        setattr(sys.modules[module], name, value)


def fa4_forward(*tensors: torch.Tensor, out: torch.Tensor | None, **_: Any) -> tuple[torch.Tensor, None]:
    rows = 3
    if out is None:
        out = torch.full_like(tensors[2], float("nan"))
    out[:rows] = tensors[2][:rows]
    return out, None


@pytest.mark.usefixtures("hopper")
def test_without_packages_it_is_the_one_in_torch() -> None:
    backend = FlashAttnBackend.for_device(GPU)
    assert backend.version == 2
    assert backend.implementation == f"FlashAttention 2 in torch {torch.__version__}"
    assert FlashAttnBackend.variants(GPU) == ("2",)


@pytest.mark.usefixtures("hopper")
def test_the_newest_installed_generation_is_taken_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn_interface", flash_attn_varlen_func=Recorder(False))
    assert FlashAttnBackend.for_device(GPU).implementation == "flash-attn-3 9.9 of flash_attn_3"
    install(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=fa4_forward)
    newest = FlashAttnBackend.for_device(GPU)
    short = f"FlashAttention 2 in torch {torch.__version__} for segments of at most {SHORT_ROWS} rows"
    assert (newest.version, newest.implementation) == (4, f"flash-attn-4 9.9 of flash-attn-4; {short}")
    assert FlashAttnBackend.for_device(GPU, "4").implementation == "flash-attn-4 9.9 of flash-attn-4"
    assert installed_generations(GPU) == (2, 3, 4)
    # `auto` tries the mix, as the name alone gives it.
    assert FlashAttnBackend.variants(GPU) == (None, "3", "2", *(f"4:{tile}" for tile in TILES))


@pytest.mark.usefixtures("hopper")
def test_an_older_generation_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(False)
    install(monkeypatch, "flash_attn_interface", flash_attn_varlen_func=Recorder(False))
    install(monkeypatch, "flash_attn", flash_attn_varlen_func=recorder)
    backend = FlashAttnBackend.for_device(GPU, "2")
    assert (backend.version, backend.implementation) == (2, "flash-attn 9.9 of flash-attn")
    backend.varlen(*ones(3), OFFSETS, 7, 0.5)
    (options,) = recorder.calls
    assert options["cu_seqlens_q"] is OFFSETS
    assert options["cu_seqlens_k"] is OFFSETS
    assert (options["max_seqlen_q"], options["max_seqlen_k"]) == (7, 7)
    assert (options["softmax_scale"], options["causal"]) == (0.5, False)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("version", "message"),
    [
        (3, "FlashAttention 3 cannot run on cuda:0: flash-attn 3 does not import"),
        (4, r"FlashAttention 4 cannot run on cuda:0: .*pip install '\.\[flash-attn-4\]'"),
        (5, "--flash-attn-version is 5; known generations are 2, 3, 4"),
    ],
)
def test_a_forced_generation_that_is_not_there_is_refused(version: int, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        FlashAttnBackend.for_device(GPU, str(version))


def test_generations_without_kernels_for_the_gpu_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (12, 0))
    with pytest.raises(BackendError, match="kernels for Hopper only"):
        FlashAttnBackend.for_device(GPU, "3")
    with pytest.raises(BackendError, match="kernels for Hopper and Blackwell only"):
        FlashAttnBackend.for_device(GPU, "4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (7, 5))
    assert FlashAttnBackend.unavailable_reason(GPU) == "it needs compute capability 8.0 or newer"


@pytest.mark.usefixtures("hopper")
def test_dtypes_and_widths_that_it_does_not_take() -> None:
    backend = FlashAttnBackend.for_device(GPU)
    assert backend.unsupported_reason(72, torch.bfloat16) is None
    assert "float32" in str(backend.unsupported_reason(72, torch.float32))
    assert "head width 68" in str(backend.unsupported_reason(68, torch.bfloat16))
    assert "head width 264" in str(backend.unsupported_reason(264, torch.float16))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("returns_tuple", [False, True])
def test_generation_3_leaves_no_nan_in_padded_rows_of_a_graph(
    returns_tuple: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "flash_attn_interface", flash_attn_varlen_func=Recorder(returns_tuple))
    backend = FlashAttnBackend.for_device(GPU, "3")
    packed = ones(5)
    eager = backend.varlen(*packed, OFFSETS, 2, 1.0)
    assert eager[3:].isnan().all(), "eager has no padded rows and must not pay for them"
    with backend.graph_path():
        captured = backend.varlen(*packed, OFFSETS, 2, 1.0)
    assert captured[:, 0, 0].tolist() == [1, 1, 1, 0, 0]


@pytest.mark.usefixtures("hopper")
def test_generation_4_writes_all_layers_of_a_graph_to_one_zeroed_output(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=fa4_forward)
    backend = FlashAttnBackend.for_device(GPU, "4")
    packed = ones(5)
    backend.outputs.reserve(9)
    with backend.graph_path():
        first = backend.varlen(*packed, OFFSETS, 2, 1.0)
        second = backend.varlen(*packed, OFFSETS, 2, 1.0)
    assert first[:, 0, 0].tolist() == [1, 1, 1, 0, 0]
    assert second.data_ptr() == first.data_ptr()
    assert first.untyped_storage().nbytes() == 9 * 8 * 4
    assert backend.varlen(*packed, OFFSETS, 2, 1.0).data_ptr() != first.data_ptr()


@pytest.mark.usefixtures("hopper")
def test_short_segments_go_to_generation_2_unless_one_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows have far more slots than segments; and what it leaves in padded rows is loaded by generation 4 later."""
    recorder = Recorder(False)
    install(monkeypatch, "flash_attn", flash_attn_varlen_func=recorder)
    install(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=fa4_forward)
    free, forced = FlashAttnBackend.for_device(GPU), FlashAttnBackend.for_device(GPU, "4")
    packed = ones(5)
    free.varlen(*packed, OFFSETS, SHORT_ROWS + 1, 1.0)
    forced.varlen(*packed, OFFSETS, SHORT_ROWS, 1.0)
    assert not recorder.calls
    eager = free.varlen(*packed, OFFSETS, SHORT_ROWS, 1.0)
    assert len(recorder.calls) == 1
    assert eager[3:].isnan().all(), "eager has no padded rows and must not pay for them"
    with free.graph_path():
        captured = free.varlen(*packed, OFFSETS, SHORT_ROWS, 1.0)
    assert captured[:, 0, 0].tolist() == [1, 1, 1, 0, 0]


@pytest.mark.usefixtures("hopper")
def test_auto_may_give_generation_4_another_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def forward(*tensors: torch.Tensor, tile_mn: Any = None, **_: Any) -> tuple[torch.Tensor, None]:
        given.append(tile_mn)
        return tensors[2].clone(), None

    install(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=forward)
    tiled = FlashAttnBackend.for_device(GPU, "4:128x128")
    for backend in (tiled, FlashAttnBackend.for_device(GPU)):
        backend.varlen(*ones(5), OFFSETS, 500, 1.0)
    assert given == [(128, 128), None], "the name alone means what an engine would run"
    assert tiled.implementation.endswith("in tiles of 128x128")
    assert tiled.unsupported_reason(72, torch.bfloat16) is None
    assert "heads of 65 to 96" in str(tiled.unsupported_reason(128, torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (10, 0))
    assert FlashAttnBackend.variants(GPU) == (None, "2"), "the tiles are Hopper's"


@pytest.mark.usefixtures("hopper")
def test_generation_4_builds_what_lengths_to_come_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keys its kernels on thresholds of its own, and a first call beyond one of them takes seconds."""
    built: list[tuple[int, int]] = []

    def forward(*tensors: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int, **_: Any) -> tuple[Any, None]:
        assert int(cu_seqlens_q[-1]) == len(tensors[0])
        built.append((max_seqlen_q, len(cu_seqlens_q) - 1))
        return tensors[2].clone(), None

    install(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=forward)
    backend = FlashAttnBackend.for_device(GPU, "4")
    shapes = [(rows, 1, rows) for rows in range(100, 3000, 20)] + [(900, 20, 50), (300, 3, 100)]
    backend.prepare(shapes)
    assert not built, "no head shape is known before the first call"
    backend.varlen(*ones(5), torch.tensor([0, 5], dtype=torch.int32), 5, 1.0)
    built.clear()
    backend.prepare(shapes)

    def sides(longest: int, slots: int) -> tuple[bool, ...]:
        """On which side of thresholds like FlashAttention's own a call is."""
        return (*(longest <= limit for limit in (128, 192, 256, 512, 1024, 2048)), slots > 16)

    assert {sides(*call) for call in built} == {sides(longest, slots) for _, slots, longest in shapes}
    assert len(built) < 20
    assert backend.plan_build_ms > 0


@pytest.mark.usefixtures("hopper")
def test_compiled_code_gets_an_output_of_each_calls_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may keep other values in memory that a call returned: a shared output would overwrite them a layer later."""
    install(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=fa4_forward)
    backend = FlashAttnBackend.for_device(GPU, "4")
    backend.outputs.are_fresh = True
    packed = ones(5)
    with backend.graph_path():
        first = backend.varlen(*packed, OFFSETS, 2, 1.0)
        second = backend.varlen(*packed, OFFSETS, 2, 1.0)
        assert second.data_ptr() != first.data_ptr()
        assert first[:, 0, 0].tolist() == [1, 1, 1, 0, 0]
        with backend.one_forward():
            in_forward = [backend.varlen(*packed, OFFSETS, 2, 1.0) for _ in range(3)]
        with backend.one_forward():
            in_forward.append(backend.varlen(*packed, OFFSETS, 2, 1.0))
    assert len({output.data_ptr() for output in (first, second, *in_forward)}) == 6
    assert all(torch.equal(output, first) and output.is_contiguous() for output in in_forward)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_equal_tiles_have_no_padded_rows_to_zero(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def forward(*tensors: torch.Tensor, out: torch.Tensor | None, **_: Any) -> tuple[torch.Tensor, None]:
        given.append(out)
        return tensors[2].clone(), None

    install(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=forward)
    backend = FlashAttnBackend.for_device(GPU, "4")
    backend.outputs.are_fresh = is_compiled
    tiles = torch.randn(2, 1, 5, 8)
    with backend.graph_path():
        out = backend.dense(tiles, tiles, tiles, None, 1.0)
        backend.varlen(*ones(5), OFFSETS, 2, 1.0)
    assert torch.equal(out, tiles.transpose(1, 2))
    assert [target is None for target in given] == [True, False], "the packed call after it is guarded again"
