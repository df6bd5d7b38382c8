"""Error policies: which rule decides, and when a job is over a limit."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from airflow_geneva.engine.apply.skipped_rows import exceeded_limit
from airflow_geneva.engine.udf.error_policy import (
    Fail,
    Policy,
    Retry,
    Rules,
    Skip,
    deciding_rule,
    matching_rules_of,
    pause_before,
    rules_of,
)
from airflow_geneva.errors import UdfCrashed


def test_fail_has_no_rules_and_skip_is_one_for_every_exception() -> None:
    assert rules_of("fail") == ()
    assert rules_of("skip") == (Skip(Exception, max_count=100, max_fraction=0.05),)
    assert rules_of((Fail(),)) == (Fail(),)


@pytest.mark.parametrize("exception", [ValueError, TimeoutError, UdfCrashed, UnicodeDecodeError])
def test_skip_fits_every_exception(exception: type[Exception]) -> None:
    assert matching_rules_of(rules_of("skip"), exception) == (0,)


def test_rules_fit_subclasses_and_fail_fits_all() -> None:
    rules: Rules = (Skip(KeyError), Retry((OSError, LookupError)), Fail(), Skip(Exception))
    assert matching_rules_of(rules, KeyError) == (0, 1, 2, 3)
    assert matching_rules_of(rules, ConnectionResetError) == (1, 2, 3)
    assert matching_rules_of(rules, ValueError) == (2, 3)


def test_of_the_rules_that_fit_the_first_decides() -> None:
    rules: Rules = (Skip(KeyError), Skip(LookupError), Fail(), Skip(Exception))
    assert deciding_rule(rules, (0, 1, 2, 3), 1) == 0
    assert deciding_rule(rules, (1, 2, 3), 1) == 1
    assert deciding_rule(rules, (2, 3), 1) == 2
    assert deciding_rule(rules, (), 1) is None


def test_a_retry_decides_until_its_attempts_are_used_up() -> None:
    rules: Rules = (Retry(OSError, attempts=3), Skip(OSError))
    assert [deciding_rule(rules, (0, 1), calls) for calls in (1, 2, 3, 4)] == [0, 0, 1, 1]
    assert deciding_rule(rules[:1], (0,), 3) is None
    assert deciding_rule(rules, (0, 1), None) == 1


def test_the_pause_doubles_before_each_further_call() -> None:
    assert [pause_before(Retry(OSError, backoff=0.5), calls) for calls in (1, 2, 3)] == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("policy", ["fail", (Skip(Exception),), (Skip(ValueError),), (Retry(OSError), Fail())])
def test_without_limits_nothing_is_exceeded(policy: Policy) -> None:
    assert exceeded_limit(policy, {0: 10**9}, 1) is None


def test_a_count_over_the_limit_names_rule_limit_and_what_was_found() -> None:
    policy = (Retry(OSError), Skip((ValueError, KeyError), max_count=1_000))
    assert exceeded_limit(policy, {1: 1_000}, 10_000) is None
    said = exceeded_limit(policy, {1: 1_001}, 10_000)
    assert said is not None
    assert said.startswith(
        "Skip((ValueError, KeyError), max_count=1000) lets a job skip at most 1,000 rows of 10,000, and 1,001 failed."
    )


def test_a_fraction_over_the_limit_names_the_jobs_rows() -> None:
    policy = (Skip(ValueError, max_fraction=0.1),)
    assert exceeded_limit(policy, {0: 10}, 100) is None
    said = exceeded_limit(policy, {0: 11}, 100)
    assert said is not None
    assert "Skip(ValueError, max_fraction=0.1) lets a job skip at most 10 rows of 100, and 11 failed." in said
    assert "on_error=[Skip(ValueError)] allows any number" in said


@pytest.mark.parametrize(("rows", "most"), [(10, 100), (2_000, 100), (2_001, 100), (4_000, 200)])
def test_skip_allows_a_twentieth_of_a_job_and_always_a_hundred_rows(rows: int, most: int) -> None:
    assert exceeded_limit("skip", {0: most}, rows) is None
    said = exceeded_limit("skip", {0: most + 1}, rows)
    assert said is not None
    assert said.startswith('on_error="skip" lets a job skip at most')
    assert "on_error=[Skip(Exception)] allows any number" in said


def test_each_rule_counts_its_own_rows() -> None:
    policy = (Skip(ValueError, max_count=5), Skip(KeyError, max_count=5))
    assert exceeded_limit(policy, {0: 5, 1: 5}, 10) is None
    assert "KeyError" in str(exceeded_limit(policy, {0: 5, 1: 6}, 11))


@given(st.integers(1, 100), st.floats(0.01, 1), st.integers(0, 200), st.integers(1, 1_000))
def test_a_job_is_over_its_limits_exactly_when_both_are_passed(most: int, part: float, found: int, rows: int) -> None:
    policy = (Skip(ValueError, max_count=most, max_fraction=part),)
    assert (exceeded_limit(policy, {0: found}, rows) is not None) == (found > most and found > part * rows)
