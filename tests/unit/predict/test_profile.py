"""The saved profile: it survives a file, and what cannot be used is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import synthetic_profile

from vitgraph.errors import UsageError
from vitgraph.planning.budgets import CaptureAxis, EncoderItemSpec
from vitgraph.predict.doubt import describe_profile
from vitgraph.predict.profile import ProfileError, load_profile, profile_of
from vitgraph.records.calibrate_result import EagerPoint, EncoderFacts, Timing
from vitgraph.records.sections import Compiled, Encoder, Environment
from vitgraph.records.store import read_record
from vitgraph.report.views.parts import calibrate_document
from vitgraph.specs.parts import ModelSpec

STORED = Path(__file__).parents[2] / "data" / "synthetic-profile.json"


def load_changed(folder: Path, change: Callable[[Any, Any], object]) -> None:
    """Loads the stored profile after a change of its record and its result."""
    record = json.loads(STORED.read_text())
    change(record, record["result"])
    (folder / "changed.json").write_text(json.dumps(record))
    load_profile(folder / "changed.json")


def test_profile_survives_its_file(tmp_path: Path) -> None:
    profile = synthetic_profile()
    item = EncoderItemSpec("image", 8, 6, 2, {"global": 2, "local": 4}, {"grid": (2, 3)})
    profile.eager.append(EagerPoint((item, item), Timing(2.0, 1.0, 3.0, 5)))
    profile.encoder = EncoderFacts({"default": 64}, ("x",), ("image",), 2, 8, (CaptureAxis("grid", ((2, 3), (4, 4))),))
    profile.save(tmp_path / "profile.json")
    loaded = profile_of(read_record(tmp_path / "profile.json"))  # type: ignore[arg-type]
    assert loaded.to_record().result == profile.to_record().result
    assert loaded.label == profile.label


def test_a_profile_whose_figures_make_no_model_is_refused_when_it_is_read(tmp_path: Path) -> None:
    profile = synthetic_profile()
    eager = profile.eager[0]
    profile.eager[0] = EagerPoint((replace(eager.items[0], output_tokens=10**400),), eager.time)
    profile.save(tmp_path / "profile.json")
    with pytest.raises(ProfileError, match=r"its figures make no cost model .*calibrate again"):
        load_profile(tmp_path / "profile.json")


def test_stored_profile_says_that_it_is_synthetic() -> None:
    profile = load_profile(STORED)
    assert profile.is_synthetic
    assert "synthetic" in profile.label


def test_profile_is_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("kept")
    with pytest.raises(UsageError, match="exists"):
        synthetic_profile().save(path)
    assert path.read_text() == "kept"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record, _: record.update(kind="bench"), "of kind 'bench'"),
        (lambda record, _: record.update(format=3), "of format 3, and this vitgraph reads 2"),
        (lambda _, result: result.update(replays=[]), "replays of 0 budget"),
        (lambda _, result: result.update(eager=[]), "0 eager call"),
        (lambda _, result: result.update(max_tokens="many"), "result.max_tokens: Input should be a valid integer"),
        (lambda _, result: result["eager"][0]["time"].pop("low_ms"), "result.eager.0.time.low_ms: Field required"),
        (lambda _, result: result["eager"][0]["items"][0].update(count=10**9), "count is 1000000000"),
        (lambda _, result: result.pop("max_tokens"), "result.max_tokens: Field required"),
        (lambda _, result: result["replays"][3]["time"].update(ms=0.0), "times are positive"),
    ],
)
def test_unusable_profile_is_refused_with_the_reason(
    tmp_path: Path, change: Callable[[Any, Any], object], message: str
) -> None:
    with pytest.raises(ProfileError, match=message) as raised:
        load_changed(tmp_path, change)
    assert "changed.json" in str(raised.value)


def test_file_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"none\.json"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(ProfileError, match=r"text\.json is not valid JSON"):
        load_profile(tmp_path / "text.json")


PLAIN = Encoder(attn_backend="FLASH_ATTN", dtype="bfloat16")
COMPILED = PLAIN.but(compiled=Compiled(blocks=27))


def test_a_tower_is_measured_as_it_was_calibrated() -> None:
    profile = synthetic_profile()
    profile.environment = profile.environment.but(encoder=COMPILED)
    asked = ModelSpec("some-model", seed=3)
    assert profile.measured_spec(asked, ()) == replace(asked, compile=True, attn_backend="FLASH_ATTN", dtype="bfloat16")
    elsewhere = profile.measured_spec(asked, {"FLASH_ATTN"})
    assert (elsewhere.attn_backend, elsewhere.compile) == ("auto", True)
    wanted = replace(asked, attn_backend="TORCH_SDPA", dtype="float16", compile=True)
    assert profile.measured_spec(wanted, ()) == wanted
    profile.environment = profile.environment.but(encoder=PLAIN)
    assert not profile.measured_spec(wanted, ()).compile


def choice(rows: int, **milliseconds: float) -> dict[str, Any]:
    """A graph's choice, whose fastest is taken."""
    best = min(milliseconds, key=milliseconds.__getitem__)
    return {"rows": rows, "slots": 1, "longest": rows, "is_graph": True, "backend": best, "milliseconds": milliseconds}


def test_an_engine_is_given_the_one_backend_that_is_best_alone_for_its_calls(tmp_path: Path) -> None:
    """With a backend a graph the profile has three; `FLASH_ATTN:2` is none that an engine's setting names."""
    profile = synthetic_profile()
    variants = {"FLASH_ATTN:2": 0.5}
    choices = [choice(400, A=1.0, B=3.0), choice(4000, A=9.0, B=6.0), choice(800, A=2.0, B=2.5, **variants)]
    auto = PLAIN.but(attn_backend="auto", attn_choices=choices)
    profile.environment = profile.environment.but(encoder=auto)
    path = tmp_path / "profile.json"
    profile.save(path)
    loaded = load_profile(path)
    assert loaded.engine_backend({300: 10, 700: 1, 3000: 1}) == ("A", pytest.approx((10 + 2 + 9) / (10 + 0.5 + 6)))
    assert loaded.engine_backend({300: 1, 5000: 9})[0] == "B", "larger calls than any graph count as the largest"
    asked = ModelSpec("some-model")
    assert loaded.measured_spec(asked, (), "B").attn_backend == "B"
    profile.environment = profile.environment.but(encoder=auto.but(attn_choices=None))
    assert profile.engine_backend({300: 1}) == (None, None)
    profile.environment = profile.environment.but(encoder=PLAIN)
    assert profile.engine_backend({300: 1}) == ("FLASH_ATTN", None)


def test_what_is_not_what_was_calibrated_is_named() -> None:
    profile = synthetic_profile()
    same = profile.environment = Environment(device="NVIDIA H200", device_type="cuda", encoder=PLAIN)
    assert profile.differences(same) == []
    assert profile.differences(same.but(encoder=None)) == []
    (device,) = profile.differences(same.but(device="NVIDIA B200"))
    assert "NVIDIA H200" in device and "NVIDIA B200" in device
    (compiled,) = profile.differences(same.but(encoder=COMPILED))
    assert "were not compiled" in compiled and "`vitgraph calibrate --compile`" in compiled
    profile.environment = same.but(encoder=COMPILED)
    backend, plain = profile.differences(same.but(encoder=PLAIN.but(attn_backend="TRITON_ATTN")))
    assert backend.startswith("the attention backend was FLASH_ATTN") and "were compiled" in plain


def test_what_auto_chose_while_calibrating_is_said() -> None:
    profile = load_profile(STORED)
    choice = {"rows": 2048, "slots": 1, "longest": 2048, "is_graph": True, "backend": "TRITON_ATTN", "milliseconds": {}}
    chosen = Encoder(dtype="bfloat16", attn_backend="auto", attn_choices=[choice])
    profile.environment = profile.environment.but(encoder=chosen)
    facts = calibrate_document(describe_profile(profile)).sections[1].blocks[0]
    assert ("Attention", "graphs: TRITON_ATTN at 2,048 rows") in facts.pairs
