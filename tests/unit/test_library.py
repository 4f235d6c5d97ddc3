"""`import vitgraph`: its page runs as it is printed, it imports nothing heavy, and refuses what the commands refuse."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import vitgraph

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "library.md"


@pytest.mark.slow
def test_the_page_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parsed = doctest.DocTestParser().get_doctest(PAGE.read_text(encoding="utf-8"), {}, PAGE.name, str(PAGE), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    said: list[str] = []
    runner.run(parsed, out=said.append)
    assert not runner.failures, "".join(said)
    assert runner.tries > 20


def test_the_page_shows_every_name() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in vitgraph.__all__:
        assert name == "__version__" or f"vitgraph.{name}" in page


def test_importing_it_brings_nothing_heavy() -> None:
    """Neither the package nor what records are judged and calls are shared by."""
    program = (
        "import sys, vitgraph\n"
        "def check(*heavy): assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)\n"
        "dir(vitgraph); check('torch', 'transformers', 'numpy', 'pandas', 'yaml')\n"
        "import vitgraph.records.stats; check('torch', 'pandas')\n"
        "import vitgraph.predict.assignment, vitgraph.measure.preparation; check('torch')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": str(ROOT)})


def test_every_function_is_typed_and_documented() -> None:
    assert (ROOT / "vitgraph" / "py.typed").exists()
    for name in (name for name in vitgraph.__all__ if inspect.isfunction(getattr(vitgraph, name))):
        function = getattr(vitgraph, name)
        assert "Raises:" in (function.__doc__ or "") or name == "encode_eagerly"
        assert set(inspect.signature(function).parameters) | {"return"} == set(function.__annotations__)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: vitgraph.load_encoder("qwen3-vl-debug", mm_encoder_attn_backend="FLASH_ATN"), "FLASH_ATN"),
        (lambda: vitgraph.load_encoder("qwen3-vl-debug", dtype=8), "dtype is 8"),
        (lambda: vitgraph.plan("qwen3-vl-debug", token_budgets=[0]), "--token-budgets has 0"),
        (lambda: vitgraph.plan("no-such-model"), "no-such-model"),
        (lambda: vitgraph.explain("qwen3-vl-debug", vitgraph.plan("qwen3-vl-debug"), [(64, 64)], "best"), "best"),
        (lambda: vitgraph.explain("qwen3-vl-debug", vitgraph.plan("qwen3-vl-debug"), []), "no items"),
        (lambda: vitgraph.bench("qwen3-vl-debug", json=True), "unknown key 'json'"),
        (
            lambda: vitgraph.bench("qwen3-vl-debug", tensor_parallel_size=2, mm_encoder_tp_mode="data"),
            "in this process",
        ),
        (lambda: vitgraph.read_samples("no-such-folder"), "no-such-folder"),
        (lambda: vitgraph.bench("qwen3-vl-debug", token_budgets=[64], compilation_config={"foo": 1}), "foo"),
    ],
)
def test_what_a_command_refuses_is_refused(call: object, named: str) -> None:
    with pytest.raises(vitgraph.VitgraphError, match=named):
        call()  # type: ignore[operator]


def test_sizes_and_images_do_not_mix() -> None:
    encoder = vitgraph.load_encoder("qwen3-vl-debug", load_format="dummy", device="cpu")
    with pytest.raises(vitgraph.VitgraphError, match="sizes or images"):
        vitgraph.make_inputs(encoder, [(64, 64), Image.new("RGB", (64, 64))])


def test_an_unknown_name_lists_those_that_there_are() -> None:
    with pytest.raises(AttributeError, match="load_encoder"):
        _ = vitgraph.load_model
