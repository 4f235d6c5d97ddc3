"""Where one attention backend overtakes another, from made-up times."""

from __future__ import annotations

import pytest

from vitgraph.records.results import MicroRow, crossings


def rows(backend: str, times: dict[int, float | None], sweep: str = "length", kept: int = 1) -> list[MicroRow]:
    """Times of calls by what is varied."""
    kept_name, varied = ("segments", "segment_length") if sweep == "length" else ("segment_length", "slots")
    return [
        MicroRow.model_validate(
            {"backend": backend, "status": "ok" if time else "error", "reason": None if time else "failed"}
            | {"sweep": sweep, kept_name: kept, varied: size, "milliseconds": time}
        )
        for size, time in times.items()
    ]


def test_the_size_at_which_the_fastest_backend_changes_is_interpolated() -> None:
    """Linear and quadratic times are powers of the size: 0.01 n and 1e-4 n^2 meet at 100."""
    linear = rows("LINEAR", {size: 0.01 * size for size in (10, 64, 400, 4000)})
    square = rows("SQUARE", {size: 1e-4 * size**2 for size in (10, 64, 400, 4000)})
    (one,) = crossings(linear + square)
    assert (one.sweep, one.segments, one.segment_length) == ("length", 1, None)
    assert (one.below, one.above, one.low, one.high) == ("SQUARE", "LINEAR", 64, 400)
    assert one.equal_at == pytest.approx(100)


def test_each_sweep_and_count_of_segments_has_its_own() -> None:
    one = rows("A", {64: 1.0, 256: 4.0}) + rows("B", {64: 2.0, 256: 2.0})
    eight = rows("A", {64: 1.0, 256: 1.0}, kept=8) + rows("B", {64: 2.0, 256: 2.0}, kept=8)
    slots = rows("A", {1: 3.0, 64: 5.0}, "slots", 400) + rows("B", {1: 4.0, 64: 4.0}, "slots", 400)
    found = crossings(one + eight + slots)
    assert [(each.sweep, each.segments, each.segment_length, each.above) for each in found] == [
        ("length", 1, None, "B"),
        ("slots", None, 400, "B"),
    ]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param({64: 1.0, 256: 2.0}, {64: 1.01, 256: 1.99}, [], id="within the noise"),
        pytest.param({64: 1.0, 256: None}, {64: 2.0, 256: 3.0}, [("A", "B", 128.0)], id="one fails at the larger"),
        pytest.param({64: 1.0, 256: 3.0, 1024: 4.0}, {64: 2.0, 256: 2.0, 1024: 9.0}, ["B", "A"], id="there and back"),
        pytest.param({64: 1.0, 256: 2.0}, {}, [], id="alone"),
        pytest.param({64: None}, {64: None}, [], id="nothing timed"),
    ],
)
def test_noise_failures_and_returns(first: dict, second: dict, expected: list) -> None:
    found = crossings(rows("A", first) + rows("B", second))
    if expected and isinstance(expected[0], tuple):
        assert [(one.below, one.above, one.equal_at) for one in found] == expected
    else:
        assert [one.above for one in found] == expected
