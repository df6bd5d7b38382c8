"""How long rows still take, by samples of how many were done when."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

import pytest

from airflow_geneva.job.trend import rest_of, rows_of_longest_line, seconds_per_row

ROWS = 1000


def seen(cost: Callable[[float], float], share: float, every: int) -> tuple[list[tuple[float, int]], float]:
    """Return samples, one of each so many rows, until a share of all rows is done, and the true seconds that are left.

    Args:
        cost: of a row, by the share of the rows before it.
    """
    ends = list(accumulate(cost(row / ROWS) for row in range(ROWS)))
    samples = [(ends[row - 1], row) for row in range(every, int(share * ROWS) + 1, every)]
    return samples, ends[-1] - samples[-1][0]


def expect(samples: list[tuple[float, int]]) -> float:
    left = ROWS - samples[-1][1]
    each = seconds_per_row(samples, left)
    assert each is not None
    return left * each


@pytest.mark.parametrize("every", [1, 7, 20, 90])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_an_even_speed_goes_on_whatever_is_sampled_and_whatever_was_waited_for(every: int, share: float) -> None:
    samples, left = seen(lambda at: 0.1, share, every)
    assert expect(samples) == pytest.approx(left)
    assert expect([(40 + after, rows) for after, rows in samples]) == pytest.approx(left)


@pytest.mark.parametrize("samples", [[], [(4.0, 10)]])
def test_the_first_rows_alone_say_nothing(samples: list[tuple[float, int]]) -> None:
    assert seconds_per_row(samples, 990) is None


@pytest.mark.parametrize("share", [0.4, 0.5, 0.7])
@pytest.mark.parametrize("cost", [lambda at: 0.5 + at, lambda at: 1.5 - at], ids=["rising", "falling"])
def test_a_cost_that_rises_or_falls_goes_on_to_do_so(cost: Callable[[float], float], share: float) -> None:
    samples, left = seen(cost, share, 20)
    assert expect(samples) == pytest.approx(left, rel=0.2)


def test_a_cost_that_falls_steeply_is_not_expected_to_become_nothing() -> None:
    samples, _ = seen(lambda at: max(1 - 3 * at, 0.01), 0.3, 20)
    average = (samples[-1][0] - samples[0][0]) / (samples[-1][1] - samples[0][1])
    assert expect(samples) == pytest.approx(700 * average / 1.5)


def test_noise_is_no_trend() -> None:
    chance = random.Random(0)
    near = []
    for _ in range(50):
        costs = [chance.lognormvariate(0, 0.8) for _ in range(ROWS)]
        samples, left = seen(lambda at, costs=costs: costs[round(at * ROWS)], 0.5, 20)  # type: ignore[misc]
        near.append(abs(expect(samples) / left - 1) < 0.2)
    assert sum(near) > 45


def test_a_stall_is_not_expected_again() -> None:
    samples, left = seen(lambda at: 60.0 if round(at * ROWS) == 200 else 0.1, 0.5, 20)
    assert left * 0.9 < expect(samples) < left * 1.3
    assert left < 0.6 * (samples[-1][0] / samples[-1][1]) * 500


def test_the_longest_line_is_that_of_the_slot_that_ends_last() -> None:
    assert rows_of_longest_line([30, 50], [80], 2) == 110
    assert rows_of_longest_line([30, 50], [], 2) == 50
    assert rows_of_longest_line([], [10, 10, 10, 40], 2) == 50
    assert rows_of_longest_line([0, 0, 7], [], 1) == 7
    assert rows_of_longest_line([], [], 4) == 0


def test_what_takes_longer_than_expected_is_not_expected_to_end_at_once() -> None:
    assert rest_of(10.0, 4.0) == 6.0
    assert rest_of(10.0, 20.0) == 4.0
    assert rest_of(10.0, 0.0) == 10.0
