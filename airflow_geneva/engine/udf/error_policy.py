"""Error policies: what to do with a row on which the UDF raises, and which rule decides that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from airflow_geneva.errors import InvalidInput

Exceptions = type[Exception] | tuple[type[Exception], ...]


@dataclass(frozen=True)
class Retry:
    """Call the UDF again when it raises one of these.

    Args:
        exc: exception class or classes.
        attempts: total number of calls, at least 2.
        backoff: seconds before the second call, doubled before each further one.
    """

    exc: Exceptions
    attempts: int = 3
    backoff: float = 1.0

    def __post_init__(self) -> None:
        _check_exceptions(self, self.exc)
        if not isinstance(self.attempts, int) or self.attempts < 2:
            raise InvalidInput(f"Retry(attempts={self.attempts!r}): give the total number of calls, at least 2.")
        if not self.backoff >= 0:
            raise InvalidInput(f"Retry(backoff={self.backoff!r}): give seconds, at least 0.")


@dataclass(frozen=True)
class Skip:
    """Leave the row NULL and list it as failed when the UDF raises one of these.

    With both limits, a job may skip the larger number of rows. Rows that failed in an earlier job and are retried do
    not count.

    Args:
        exc: exception class or classes.
        max_count: maximum number of rows that a job may skip; None: no limit.
        max_fraction: maximum fraction of a job's rows that it may skip, above 0 and up to 1; None: no limit.
    """

    exc: Exceptions
    max_count: int | None = None
    max_fraction: float | None = None

    def __post_init__(self) -> None:
        _check_exceptions(self, self.exc)
        if self.max_count is not None and (not isinstance(self.max_count, int) or self.max_count < 1):
            raise InvalidInput(f"Skip(max_count={self.max_count!r}): give a number of rows of at least 1, or None.")
        if self.max_fraction is not None and not 0 < self.max_fraction <= 1:
            raise InvalidInput(f"Skip(max_fraction={self.max_fraction!r}): give a fraction above 0 up to 1, or None.")

    def most_of(self, rows: int) -> float | None:
        """Return the most rows that a job of this size may skip; None: no limit."""
        limits = [self.max_count, None if self.max_fraction is None else self.max_fraction * rows]
        return max((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True)
class Fail:
    """Fail the job for any exception; rules before this one in the list are checked first."""


Rules = tuple[Retry | Skip | Fail, ...]
Policy = Literal["fail", "skip"] | Rules


def check_policy(value: str | Sequence[Retry | Skip | Fail]) -> Policy:
    """Return an `on_error` value in its stored form, or raise `InvalidInput`."""
    if value == "fail" or value == "skip":
        return "fail" if value == "fail" else "skip"
    if isinstance(value, (list, tuple)) and value and all(isinstance(rule, (Retry, Skip, Fail)) for rule in value):
        return tuple(value)
    raise InvalidInput(
        f'on_error={value!r} is not a policy: give "fail", "skip", or a list such as '
        "[Retry(ConnectionError, attempts=3), Skip(ValueError), Fail()]."
    )


def describe_policy(policy: Policy) -> str | list[dict[str, Any]]:
    """Return a policy as JSON values, with exception classes as dotted names."""
    if isinstance(policy, str):
        return policy
    rules = []
    for rule in policy:
        described = {"do": type(rule).__name__.lower(), **asdict(rule)}
        if not isinstance(rule, Fail):
            classes = rule.exc if isinstance(rule.exc, tuple) else (rule.exc,)
            described["exc"] = [f"{cls.__module__}.{cls.__qualname__}" for cls in classes]
        rules.append(described)
    return rules


def rules_of(policy: Policy) -> Rules:
    """Convert a policy to a list of rules: `"fail"` has none, `"skip"` is `SKIP`."""
    if policy == "fail":
        return ()
    if policy == "skip":
        return (SKIP,)
    return policy


def matching_rules_of(rules: Rules, exception: type[Exception]) -> tuple[int, ...]:
    """Return the positions of the rules that match an exception, in order; `Fail` matches all."""
    return tuple(at for at, rule in enumerate(rules) if isinstance(rule, Fail) or issubclass(exception, rule.exc))


def deciding_rule(rules: Rules, fits: tuple[int, ...], calls: int | None) -> int | None:
    """Return the position of the first matching rule that applies after `calls` calls; None: the job fails.

    A `Retry` applies until its attempts are used up, and never if `calls` is None.
    """
    for at in fits:
        rule = rules[at]
        if not isinstance(rule, Retry) or (calls is not None and calls < rule.attempts):
            return at
    return None


def pause_before(retry: Retry, calls: int) -> float:
    """Return the seconds to wait before the next call."""
    return float(retry.backoff * 2 ** (calls - 1))


def _check_exceptions(rule: Retry | Skip, exc: object) -> None:
    classes = exc if isinstance(exc, tuple) else (exc,)
    if not classes or not all(isinstance(cls, type) and issubclass(cls, Exception) for cls in classes):
        raise InvalidInput(
            f"{type(rule).__name__}({exc!r}): give an exception class or a tuple of them, such as ValueError."
        )


SKIP = Skip(Exception, max_count=100, max_fraction=0.05)
"""The rule of `"skip"`: a function that is broken fails its job soon, and a few bad rows do not."""
