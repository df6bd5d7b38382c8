"""Computed columns and materialized views of Lance tables, kept up to date by Airflow on Spark."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_geneva.database import Database, connect, connect_namespace
    from airflow_geneva.engine.limits.rate_limit import RateLimit, RateLimited, report
    from airflow_geneva.engine.udf import UDF, Fail, Retry, Skip, expect, udf
    from airflow_geneva.engine.udf.folding import udaf
    from airflow_geneva.errors import BatchFailed, GenevaError, UdfCrashed
    from airflow_geneva.query import Query
    from airflow_geneva.table import Table
    from airflow_geneva.view import View

__all__ = [
    "UDF",
    "BatchFailed",
    "Database",
    "Fail",
    "GenevaError",
    "Query",
    "RateLimit",
    "RateLimited",
    "Retry",
    "Skip",
    "Table",
    "UdfCrashed",
    "View",
    "connect",
    "connect_namespace",
    "expect",
    "report",
    "udaf",
    "udf",
]

# The package's metadata is built from this line, so a zip of the package on sys.path knows its version too.
__version__ = "0.2.0"

# Every Airflow process imports this package to read the provider's description: nothing is loaded before it is used.
_HOMES = {
    "database": ("Database", "connect", "connect_namespace"),
    "errors": ("BatchFailed", "GenevaError", "UdfCrashed"),
    "engine.limits.rate_limit": ("RateLimit", "RateLimited", "report"),
    "query": ("Query",),
    "table": ("Table",),
    "engine.udf": ("UDF", "Fail", "Retry", "Skip", "expect", "udf"),
    "engine.udf.folding": ("udaf",),
    "view": ("View",),
}
_LAZY_EXPORTS = {name: f"airflow_geneva.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
