"""On a GPU: a profile names its kernels, the patch embedding is the same product, and the host's steps are short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vitgraph.graphs.manager import EncoderCudaGraphManager
from vitgraph.measure.calls import CallInputs, make_calls
from vitgraph.measure.diagnose import Diagnosis
from vitgraph.measure.profile_call import prepare_profile, run_profile
from vitgraph.measure.setup import load, resolve_source
from vitgraph.models.encoder import VisionEncoder
from vitgraph.models.replaced_modules import PatchProduct, stock_modules
from vitgraph.planning.budgets import plan_budgets, resolve_budget_settings
from vitgraph.specs.asked import ProfileSpec
from vitgraph.specs.parts import GraphSpec, ModelSpec
from vitgraph.specs.values import parse_items
from vitgraph.workloads.base import Request

pytestmark = pytest.mark.requires_cuda

MODEL = ModelSpec("qwen3-vl-debug", load_format="dummy", device="cuda")


class Silent:
    def phase(self, name: str, total: int | None = None) -> None: ...

    def step(self) -> None: ...

    def note(self, text: str) -> None: ...


@pytest.fixture(scope="module")
def encoder() -> VisionEncoder:
    return load(resolve_source(MODEL), MODEL, device=torch.device("cuda", 0), dtype=torch.bfloat16)[0]


def test_a_profile_knows_what_its_kernels_do(tmp_path: Path) -> None:
    spec = ProfileSpec(MODEL, GraphSpec(), parse_items("2*512x512"), repeats=2, chrome_trace=True)
    record = run_profile(prepare_profile(spec), tmp_path, Silent())
    assert record["traced"] == "GPU kernels"
    for mode in ("eager", "graph"):
        entry = record["modes"][mode]
        for kind in ("attention", "product", "norm", "element-wise"):
            assert entry["kinds"][kind]["kernels"] > 0, (mode, kind, entry["top"])
        unknown = [found["name"] for found in entry["top"] if found["kind"] == "other"]
        assert entry["kinds"]["other"]["ms"] <= 0.05 * entry["busy_ms"], unknown
        assert 0 < entry["busy_ms"] <= entry["span_ms"]
    limit = record["speed_of_light"]
    assert limit["product_ms"] + limit["attention_ms"] == pytest.approx(limit["total_ms"])


@torch.inference_mode()
def test_the_patch_product_is_the_convolution_in_half_precision(encoder: VisionEncoder) -> None:
    (name,) = encoder.patch_convolutions
    product = encoder.modules.get_submodule(name)
    assert isinstance(product, PatchProduct)
    pixels = torch.randn(500, *product.weight.shape[1:], device="cuda", dtype=torch.bfloat16)
    with stock_modules(encoder):
        convolved = product(pixels).float()
    assert float((product(pixels).float() - convolved).norm() / convolved.norm()) <= 1e-2


def test_host_steps_are_measured_on_a_captured_manager(encoder: VisionEncoder) -> None:
    manager = EncoderCudaGraphManager(encoder, plan_budgets(resolve_budget_settings((1, 256), [256], 4, 0)))
    manager.capture()
    calls, _ = make_calls([Request(0, parse_items("336x336"))], encoder.rule, 1)
    steps = Diagnosis(manager, CallInputs(encoder, calls, 0), calls).host_steps()
    manager.clear()
    assert steps["replay"] > 0
    assert sum(steps[name] for name in ("plan", "metadata", "copy_in", "clone_out", "split", "other")) < 1.0
