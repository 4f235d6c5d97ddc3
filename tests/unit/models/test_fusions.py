"""What compiled blocks get beyond torch's own choices: which graphs change, that results stay, and cache entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rows_of_a_kind import each_row
from torch import nn
from torch.nn import functional

from vitgraph.measure.correctness import relative_l2
from vitgraph.measure.setup import load, resolve_source
from vitgraph.models import fusions
from vitgraph.models.fusions import (
    MOST_PERSISTENT,
    FusingCompiler,
    erf_gelu,
    join_product,
    persistent_reductions,
    replace_gelus,
)
from vitgraph.models.persistent_norms import PersistentChoices
from vitgraph.models.registry import ROWS
from vitgraph.specs.parts import ModelSpec

HALF = torch.bfloat16
EPILOGUES = {
    "qwen3_vl": 1,
    "qwen3_5": 1,
    "qwen3_5_moe": 1,
    "gemma3": 1,
    "kimi_vl": 1,
    "minicpmv_2_5": 1,
    "minicpmv_2_6_4_0": 1,
    # The erf form, and a product whose output is clamped first.
    "internvl": 0,
    "gemma4": 0,
}
"""Rows whose blocks have a gelu behind a linear layer, but for two whose form is erf and that are slow here."""

OPEN_SUMS = {"qwen3_vl", "qwen3_5", "qwen3_5_moe", "internvl"}
"""Those of them whose adapter runs the blocks, so that the last sum of one is left to the next."""


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets CPU graphs be changed: the operator applies the erf form there, which half precision hardly tells apart."""
    monkeypatch.setattr(fusions, "EPILOGUE_DEVICES", ("cpu",))


class Mlp(nn.Module):
    """Two linear layers with an activation between them, widths 32 to 64 to 32."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor], *, bias: bool = True, width: int = 64) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(32, width, bias=bias), nn.Linear(width, 32), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def used_twice(x: torch.Tensor) -> torch.Tensor:
    return tanh_gelu(x) + x


def replaced_in(module: nn.Module, *shape: int, dtype: torch.dtype = HALF) -> tuple[int, torch.Tensor, torch.Tensor]:
    """How many products took over a gelu when `module` was traced, and its result without and with them."""
    counts = []

    def trace(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        counts.append(replace_gelus(graph, join_product))
        graph.graph.lint()
        return graph.forward

    module = module.to(dtype).requires_grad_(False)
    x = torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        plain = module(x)
        module.compile(backend=trace, dynamic=True)
        fused = module(x)
    return max(counts), plain, fused


@pytest.mark.parametrize("shape", [(6, 32), (1, 6, 32), (2, 3, 5, 32)])
def test_the_tanh_form_joins_the_product_before_it(on_cpu: None, shape: tuple[int, ...]) -> None:
    count, plain, fused = replaced_in(Mlp(tanh_gelu), *shape)
    assert count == 1
    assert fused.shape == plain.shape
    assert relative_l2(fused, plain) <= 0.01


@pytest.mark.parametrize(
    ("module", "dtype"),
    [
        (Mlp(functional.gelu), HALF),
        (Mlp(nn.GELU(approximate="none")), HALF),
        (Mlp(functional.silu), HALF),
        (Mlp(used_twice), HALF),
        (Mlp(tanh_gelu, bias=False), HALF),
        (Mlp(tanh_gelu, width=60), HALF),
        (Mlp(tanh_gelu), torch.float32),
    ],
    ids=["erf", "erf module", "silu", "used twice", "no bias", "odd width", "single precision"],
)
def test_everything_else_stays(on_cpu: None, module: nn.Module, dtype: torch.dtype) -> None:
    count, plain, fused = replaced_in(module, 6, 32, dtype=dtype)
    assert count == 0
    assert torch.equal(fused, plain)


def test_the_cpu_has_no_such_epilogue() -> None:
    assert replaced_in(Mlp(tanh_gelu), 6, 32)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("row", each_row(rows=[row for row in ROWS if row.name in EPILOGUES]))
def test_which_rows_have_such_products(row: Any, on_cpu: None, traced_only: None) -> None:
    spec = ModelSpec(row.debug_preset, load_format="dummy", device="cpu", compile=True)
    _, facts = load(resolve_source(spec), spec, device=torch.device("cpu"), dtype=HALF)
    assert facts.compiled is not None and facts.compiled.fusions == {
        "persistent_reductions": False,
        "gelu_epilogues": EPILOGUES[row.name],
        "erf_gelus": int(row.name == "internvl"),
        "open_sums": row.name in OPEN_SUMS,
    }


@pytest.mark.slow
def test_inductor_compiles_the_changed_graph_for_any_length(on_cpu: None) -> None:
    plain = Mlp(tanh_gelu).to(HALF).requires_grad_(False)
    compiler = FusingCompiler()
    compiled = torch.compile(plain, backend=compiler, dynamic=True)
    with torch.inference_mode():
        for rows in (5, 9):
            x = torch.randn(rows, 32, dtype=HALF)
            assert relative_l2(compiled(x), plain(x)) <= 0.01
    assert asdict(compiler) == {
        "persistent_reductions": False,
        "gelu_epilogues": 1,
        "erf_gelus": 0,
        "open_sums": False,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_erf_form_in_fewer_instructions_is_the_erf_form(dtype: torch.dtype) -> None:
    """Over all magnitudes, no further from the exact values than torch's own, and the same in both tails."""
    x = torch.linspace(-12, 12, 40001).to(dtype)
    exact = functional.gelu(x.double())
    error, torchs = ((erf_gelu(x).double() - exact).abs(), (functional.gelu(x).double() - exact).abs())
    bound = torch.finfo(dtype).eps * exact.abs() + 1e-6
    assert bool((error <= torch.maximum(torchs, bound)).all())
    assert float(error.norm()) <= 1.01 * float(torchs.norm())
    assert erf_gelu(torch.tensor([torch.inf, torch.nan], dtype=dtype)).tolist() == pytest.approx(
        [torch.inf, torch.nan], nan_ok=True
    )


def test_compiled_code_takes_it_in_half_precision_only(traced_only: None) -> None:
    """What Inductor makes of the changed graph is shown by the tests of its cache."""
    compilers = []
    for dtype in (HALF, torch.float32):
        torch._dynamo.reset()
        compiler = FusingCompiler()
        mlp = Mlp(functional.gelu).to(dtype).requires_grad_(False)
        x = torch.randn(9, 32, dtype=dtype)
        with torch.inference_mode():
            assert relative_l2(torch.compile(mlp, backend=compiler)(x), mlp(x)) <= 0.01
        compilers.append(compiler)
    assert [compiler.erf_gelus for compiler in compilers] == [1, 0]


@pytest.mark.slow
def test_code_with_and_without_persistent_reductions_has_cache_entries_of_its_own() -> None:
    from torch._dynamo.utils import counters
    from torch._inductor.compile_fx import compile_fx

    def compile_once(*, is_persistent: bool) -> tuple[int, int]:
        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            if not is_persistent:
                return compile_fx(graph, inputs)
            with persistent_reductions() as applies:
                assert applies
                return compile_fx(graph, inputs)

        torch._dynamo.reset()
        counters.clear()
        with torch.inference_mode():
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
        return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]

    hits_and_misses = [compile_once(is_persistent=is_persistent) for is_persistent in (False, True, False, True)]
    assert hits_and_misses == [(0, 1), (0, 1), (1, 0), (1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("act", [functional.gelu, tanh_gelu], ids=["erf", "tanh"])
def test_code_with_a_fusion_comes_from_the_cache_the_second_time(
    act: Callable[[torch.Tensor], torch.Tensor], on_cpu: None
) -> None:
    from torch._dynamo.utils import counters

    found = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        mlp = Mlp(act).to(HALF).requires_grad_(False)
        with torch.inference_mode():
            torch.compile(mlp, backend=FusingCompiler(), dynamic=True)(torch.randn(9, 32, dtype=HALF))
        found.append((counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]))
    assert found == [(0, 1), (1, 0)]


def test_choices_are_back_to_what_they_were_after_a_compilation() -> None:
    from torch._inductor import config
    from torch._inductor.virtualized import V

    before = V.choices
    with persistent_reductions() as applies:
        assert applies
        assert isinstance(V.choices, PersistentChoices)
    assert V.choices is before
    assert config.inductor_choices_class is None


def test_choices_of_someone_else_stay() -> None:
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    class Theirs(InductorChoices):
        pass

    theirs = Theirs()
    with V.set_choices_handler(theirs), persistent_reductions() as applies:
        assert not applies
        assert V.choices is theirs


def test_a_torch_without_the_hook_compiles_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import choices

    monkeypatch.delattr(choices, "InductorChoices")
    with persistent_reductions() as applies:
        assert not applies


@pytest.mark.parametrize(
    ("width", "hint", "is_cooperative", "expected"),
    [
        (1024, "INNER", False, True),
        (1152, "INNER", False, True),
        (MOST_PERSISTENT, "INNER", False, True),
        (MOST_PERSISTENT + 1, "INNER", False, False),
        (1152, "INNER", True, False),
        (1152, "OUTER_TINY", False, False),
    ],
)
def test_only_contiguous_rows_that_fit_are_read_once(
    width: int, hint: str, is_cooperative: bool, expected: bool
) -> None:
    import sympy
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    features = SimpleNamespace(
        reduction_numel=sympy.Integer(width),
        numel=sympy.Integer(512),
        get_reduction_hint=lambda: ReductionHint[hint],
    )
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
        choices = PersistentChoices(MOST_PERSISTENT)
        assert choices.should_use_persistent_reduction(features, is_cooperative) is expected
