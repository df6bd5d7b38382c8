"""Apply an error policy: which rule matches an exception, and whether a limit is exceeded."""

from __future__ import annotations

from collections.abc import Mapping

from airflow_geneva.udf.error_policy import Fail, Policy, Retry, Skip

Rules = tuple[Retry | Skip | Fail, ...]


def rules_of(policy: Policy) -> Rules:
    """Convert a policy to a list of rules: `"fail"` has none, `"skip"` is `Skip(Exception)`."""
    if policy == "fail":
        return ()
    if policy == "skip":
        return (Skip(Exception),)
    return policy


def matching_rules_of(rules: Rules, exception: type[Exception]) -> tuple[int, ...]:
    """Return the positions of the rules that match an exception, in order; `Fail` matches all."""
    return tuple(at for at, rule in enumerate(rules) if isinstance(rule, Fail) or issubclass(exception, rule.exc))


def deciding_rule(rules: Rules, fits: tuple[int, ...], calls: int | None) -> int | None:
    """Return the position of the rule to apply; None: the job fails.

    A `Retry` applies until its attempts are used up; then the next matching rule applies.

    Args:
        fits: positions of the matching rules.
        calls: number of calls of the row or batch so far; None: do not call it again.
    """
    for at in fits:
        rule = rules[at]
        if not isinstance(rule, Retry) or (calls is not None and calls < rule.attempts):
            return at
    return None


def pause_before(retry: Retry, calls: int) -> float:
    """Return the seconds to wait before the next call."""
    return float(retry.backoff * 2 ** (calls - 1))


def exceeded_limit(policy: Policy, counts: Mapping[int, int], job_rows: int) -> str | None:
    """Return a message about the first exceeded limit of a `Skip` rule, or None.

    Args:
        policy: the UDF's `on_error`.
        counts: number of skipped rows, by the position of the rule.
        job_rows: rows of the job.
    """
    for at, rule in enumerate(rules_of(policy)):
        found = counts.get(at, 0)
        if not isinstance(rule, Skip) or not found:
            continue
        name = _describe(rule)
        if rule.max_count is not None and found > rule.max_count:
            return (
                f"{name} lets a job skip at most {rule.max_count:,} rows, and {found:,} failed. Fix the function or "
                "its inputs, or raise max_count."
            )
        if rule.max_fraction is not None and found > rule.max_fraction * job_rows:
            return (
                f"{name} lets a job skip at most {rule.max_fraction:.4g} of its {job_rows:,} rows, and {found:,} "
                "failed. Fix the function or its inputs, or raise max_fraction."
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
