"""What an error policy says about an exception, and about how many there were."""

from __future__ import annotations

from collections.abc import Mapping

from airflow_geneva.on_error import Fail, Policy, Retry, Skip

Rules = tuple[Retry | Skip | Fail, ...]


def rules_of(policy: Policy) -> Rules:
    """A policy as a list of rules: `"fail"` has none, `"skip"` is `Skip(Exception)`."""
    if policy == "fail":
        return ()
    if policy == "skip":
        return (Skip(Exception),)
    return policy


def fitting(rules: Rules, exception: type[Exception]) -> tuple[int, ...]:
    """Positions of the rules that fit an exception, in order; `Fail` fits all."""
    return tuple(at for at, rule in enumerate(rules) if isinstance(rule, Fail) or issubclass(exception, rule.exc))


def deciding(rules: Rules, fits: tuple[int, ...], calls: int | None) -> int | None:
    """Position of the rule that decides, or None: the job fails.

    A `Retry` decides until its attempts are used up, then the next rule that fits does.

    Args:
        fits: positions of the rules that fit.
        calls: how often the row or batch was called; None: it is not to be called again.
    """
    for at in fits:
        rule = rules[at]
        if not isinstance(rule, Retry) or (calls is not None and calls < rule.attempts):
            return at
    return None


def pause_before(retry: Retry, calls: int) -> float:
    """Seconds to wait before the next call, after so many."""
    return float(retry.backoff * 2 ** (calls - 1))


def exceeded(policy: Policy, counts: Mapping[int, int], job_rows: int) -> str | None:
    """Say which limit of a `Skip` rule a job is over, or None.

    Args:
        policy: the UDF's `on_error`.
        counts: rows that failed, by the position of the rule they were skipped under.
        job_rows: rows the job is to run.
    """
    for at, rule in enumerate(rules_of(policy)):
        found = counts.get(at, 0)
        if not isinstance(rule, Skip) or not found:
            continue
        name = _describe(rule)
        if rule.max_count is not None and found > rule.max_count:
            return (
                f"{name} lets a job skip at most {rule.max_count:,} rows, and {found:,} failed. Mend the function or "
                "its inputs, or raise max_count."
            )
        if rule.max_fraction is not None and found > rule.max_fraction * job_rows:
            return (
                f"{name} lets a job skip at most {rule.max_fraction:.4g} of its {job_rows:,} rows, and {found:,} "
                "failed. Mend the function or its inputs, or raise max_fraction."
            )
    return None


def _describe(rule: Skip) -> str:
    classes = rule.exc if isinstance(rule.exc, tuple) else (rule.exc,)
    names = ", ".join(cls.__qualname__ for cls in classes)
    limits = [
        f"{name}={value}"
        for name, value in (("max_count", rule.max_count), ("max_fraction", rule.max_fraction))
        if value is not None
    ]
    return f"Skip({', '.join([f'({names})' if len(classes) > 1 else names, *limits])})"
