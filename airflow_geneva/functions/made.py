"""Make a UDF from a class and the parameters of a factory; its version depends on both."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.code_hash.hasher import deps_version
from airflow_geneva.engine.udf import UDF, udf
from airflow_geneva.errors import InvalidInput


def make(
    base: type, data_type: pa.DataType, given: Mapping[str, Any], settings: Mapping[str, Any], **unversioned: Any
) -> UDF:
    """Make a UDF from a subclass of `base` that has the parameters as attributes; called by the public factories.

    The UDF's version depends on the parameters in `given`, not on the `unversioned` ones, and on the `revision` of the
    base class, which is increased when its values change. It does not depend on the source code, so an upgrade of this
    package recomputes nothing.
    """
    name = str(getattr(base, "name", base.__name__))
    version = deps_version([name, vars(base)["revision"], str(data_type), dict(given)], name)
    chosen = {"name": name, "version": version, **settings}
    function = type(
        base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **given, **unversioned}
    )
    made = udf(data_type=data_type, **chosen)(function)
    # Other processes import the UDF from the user's module, where it is assigned to a name.
    return replace(made, module=_caller())


def _caller() -> str:
    """Return the module that calls a factory of this package."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("airflow_geneva.functions."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "__main__"))


def library(name: str, install: str) -> Any:
    """Import a library; if it is missing, raise an `InvalidInput` with the command that installs it."""
    top = name.partition(".")[0]
    try:
        importlib.import_module(top)
    except ModuleNotFoundError as error:
        if error.name != top:
            raise
        raise InvalidInput(
            f"This function needs the package {top!r}, which {sys.executable} does not have. Install it there, and on "
            f"Spark's executors: pip install {install!r}"
        ) from error
    return importlib.import_module(name)


def check_choice(setting: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidInput(f"{setting}={value!r}: give one of {', '.join(map(repr, choices))}.")


def check_price(given: object) -> float:
    if not isinstance(given, (int, float)) or given < 0:
        raise InvalidInput(f"price_per_million_tokens={given!r}: give a number of at least 0.")
    return given


def check_prices(given: object) -> tuple[float, float]:
    """Check the prices of a prompt and an answer."""
    match given:
        case (int() | float() as prompt, int() | float() as answer) if prompt >= 0 and answer >= 0:
            return prompt, answer
    raise InvalidInput(
        f"prices_per_million_tokens={given!r}: give the price of the prompt's and that of the answer's tokens, as "
        "(2.5, 10.0)."
    )


def filled(vectors: Any, at: Sequence[int], rows: int, dimensions: int) -> pa.Array:
    """Return vectors as a column: `vectors` at the rows `at`, in this order, and NULL in all other rows."""
    import numpy as np

    found = np.asarray(vectors, np.float32).reshape(len(at), -1) if len(at) else np.empty((0, dimensions), np.float32)
    if found.shape[1] != dimensions:
        raise ValueError(f"The model returned vectors of {found.shape[1]} numbers, and dimensions={dimensions}.")
    values = np.zeros((rows, dimensions), np.float32)
    values[list(at)] = found
    is_null = np.ones(rows, bool)
    is_null[list(at)] = False
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), dimensions, mask=pa.array(is_null))
