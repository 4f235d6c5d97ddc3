"""The fits that the cost model is made of, on data with a known answer."""

from __future__ import annotations

import numpy as np
import pytest

from vitgraph.predict.fitting import MonotoneCurve, isotonic, median_of_three, nonnegative_least_squares, smooth_max


def test_least_squares_recovers_nonnegative_coefficients() -> None:
    features = np.random.default_rng(0).uniform(0, 1000, size=(20, 3)) ** 2
    assert nonnegative_least_squares(features, features @ [0.5, 0.0, 2.0]) == pytest.approx([0.5, 0.0, 2.0], abs=1e-9)


def test_least_squares_never_returns_a_negative_coefficient() -> None:
    """The unconstrained answer is (2, -1); the best non-negative one uses the first column alone."""
    features = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    found = nonnegative_least_squares(features, features @ [2.0, -1.0])
    alone = float(features[:, 0] @ (features @ [2.0, -1.0]) / (features[:, 0] @ features[:, 0]))
    assert found == pytest.approx([alone, 0.0])


def test_least_squares_of_nothing_is_zero() -> None:
    assert nonnegative_least_squares(np.zeros((0, 2)), np.zeros(0)).tolist() == [0.0, 0.0]


def test_isotonic_pools_what_falls() -> None:
    assert isotonic([1.0, 3.0, 2.0, 4.0], [1.0] * 4).tolist() == [1.0, 2.5, 2.5, 4.0]
    assert isotonic([1.0, 3.0, 2.0], [1.0, 3.0, 1.0]).tolist() == [1.0, 2.75, 2.75]


def test_curve_interpolates_and_goes_on_with_its_upper_slope() -> None:
    curve = MonotoneCurve([100, 200, 400], [1.0, 2.0, 4.0])
    assert curve([100, 150, 300, 500]).tolist() == pytest.approx([1.0, 1.5, 3.0, 5.0])


def test_curve_is_flat_below_its_first_point() -> None:
    assert float(MonotoneCurve([100, 200], [3.0, 4.0])(10)) == 3.0


def test_curve_takes_the_median_of_equal_places() -> None:
    assert float(MonotoneCurve([100, 100, 100, 200], [1.0, 9.0, 2.0, 5.0])(100)) == 2.0


def test_curve_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        MonotoneCurve([], [])


def test_smooth_max_is_either_one_where_the_other_is_nothing() -> None:
    first, second = np.array([3.0, 0.0, 4.0]), np.array([0.0, 5.0, 4.0])
    assert smooth_max(first, second, 2.0).tolist() == pytest.approx([3.0, 5.0, 4.0 * 2**0.5])


def test_median_of_three_drops_a_single_spike() -> None:
    assert median_of_three(np.array([1.0, 1.1, 9.0, 1.2, 1.3])).tolist() == [1.0, 1.1, 1.2, 1.3, 1.3]
