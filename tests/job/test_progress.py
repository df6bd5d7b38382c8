"""How often a long shard says where it is: the file every few seconds, the log less and less often."""

from __future__ import annotations

from itertools import pairwise

import pytest

from airflow_geneva.engine.job import progress
from airflow_geneva.engine.job.progress import ProgressReporter, Sample, rows_per_second


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def run(clock: Clock, reporter: ProgressReporter, seconds: float) -> list[float]:
    """Let a shard run, a row a second; returns when it said something."""
    lines: list[float] = []
    began = clock.now
    reporter.emit = lambda line: lines.append(clock.now - began)
    while clock.now < began + seconds:
        clock.now += 1
        reporter.rows_done += 1
        reporter.tick()
    return lines


def test_a_shard_of_a_minute_says_where_it_is_every_few_seconds(clock: Clock) -> None:
    assert run(clock, ProgressReporter(60, 1, _began=clock.now), 50) == [5.0 * at for at in range(1, 11)]


def test_a_shard_of_three_hours_says_it_in_less_than_a_hundred_lines(clock: Clock) -> None:
    lines = run(clock, ProgressReporter(10_800, 1, _began=clock.now), 10_800)
    pauses = [later - earlier for earlier, later in pairwise(lines)]
    assert 40 < len(lines) < 100
    assert pauses == sorted(pauses)
    assert pauses[-1] > 600 * 0.9


def test_a_function_that_loads_for_four_minutes_says_so_in_a_few_lines(clock: Clock) -> None:
    lines: list[str] = []
    reporter = ProgressReporter(5_000, 1, emit=lines.append, _began=clock.now)
    for _ in range(240):
        clock.now += 1
        reporter.tick()
    assert len(lines) <= 8
    assert lines[0] == "loading the function (5.0 s so far), 0 of 5,000 rows computed"
    reporter.rows_done += 10
    reporter.tick()
    assert "10 of 5,000 rows computed" in str(reporter.now())


@pytest.mark.slow
def test_a_shard_of_days_says_it_every_ten_minutes(clock: Clock) -> None:
    lines = run(clock, ProgressReporter(200_000, 1, _began=clock.now), 200_000)
    assert lines[-1] - lines[-2] == 600.0


def test_the_file_is_written_every_few_seconds_all_the_time(clock: Clock) -> None:
    written: list[int] = []
    reporter = ProgressReporter(3_600, 1, lambda progress: written.append(progress["rows_computed"]), _began=clock.now)
    run(clock, reporter, 3_600)
    before = written[-1]
    assert run(clock, reporter, 5) == []
    assert written[-1] == before + 5


def test_the_file_of_a_young_shard_is_written_more_often(clock: Clock) -> None:
    written: list[float] = []
    reporter = ProgressReporter(3_600, 1, lambda progress: written.append(progress["seconds"]), _began=clock.now)
    assert run(clock, reporter, 4) == []
    assert written == [1.0, 1.0, 2.0, 3.0, 4.0]  # once more for the first rows


def test_a_few_samples_over_all_of_the_time_are_kept(clock: Clock) -> None:
    written: list[tuple[Sample, ...]] = []
    reporter = ProgressReporter(30_000, 1, lambda progress: written.append(progress["samples"]), _began=clock.now)
    reporter.keep()
    run(clock, reporter, 30_000)
    assert written[0] == ((0.0, 0),)
    assert max(map(len, written)) <= 60
    samples = written[-1]
    assert len(samples) > 25
    assert all(sample.rows == sample.seconds for sample in samples)
    assert samples[-1].rows > 29_990
    pauses = [later[0] - earlier[0] for earlier, later in pairwise(samples)]
    assert max(pauses) < 30_000 / 15


def test_what_others_are_told_may_stay_as_frequent(clock: Clock) -> None:
    assert len(run(clock, ProgressReporter(1_000, 1, every=2.0, longest=2.0, _began=clock.now), 1_000)) == 500


@pytest.mark.parametrize("every", [1, 7, 20, 90])
@pytest.mark.parametrize("waited", [0, 40])
def test_an_even_speed_is_that_whatever_is_sampled_and_whatever_was_waited_for(every: int, waited: float) -> None:
    assert rows_per_second([(waited + row / 10, row) for row in range(0, 500, every)]) == pytest.approx(10)


def test_the_speed_is_that_of_the_newer_half_of_the_rows() -> None:
    assert rows_per_second([(0, 0), (4, 10)]) == 0.0  # the first rows may have waited for a model
    slower = [(row / 10, row) for row in range(1, 101)] + [(10 + row / 5, 100 + row) for row in range(1, 201)]
    assert rows_per_second(slower) == pytest.approx(5)
    stalled = [(row / 10 + 60 * (row > 40), row) for row in range(1, 201)]
    assert rows_per_second(stalled) == pytest.approx(10)
