"""The `udaf` decorator, which makes a UDF of a class whose methods fold the rows of a group into a state."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.limits.rate_limit import RateLimit, check_limit
from airflow_geneva.engine.udf.decorator import UDF
from airflow_geneva.engine.udf.error_policy import Fail, Retry, Skip, check_policy
from airflow_geneva.engine.udf.fold import Fold
from airflow_geneva.engine.udf.packages import check_requirements
from airflow_geneva.engine.udf.settings import check_flag, check_memory, check_name, check_number, check_sequence
from airflow_geneva.engine.udf.signature import UNKNOWN, Signature, read_signature, signature_of
from airflow_geneva.errors import InvalidInput

_NEEDED = ("init", "add", "merge", "finish")
_STATES = {"init": (), "merge": ("state", "other"), "finish": ("state",)}
"""The parameters after `self` of the methods that take no rows."""


def udaf(
    *,
    data_type: pa.DataType,
    state: pa.DataType,
    name: str | None = None,
    version: str | None = None,
    deps: Sequence[Any] = (),
    input_columns: Sequence[str] | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    memory: int | str | None = None,
    on_error: str | Sequence[Retry | Skip | Fail] = "fail",
    timeout: float | None = None,
    setup_timeout: float | None = None,
    cost: float | None = None,
    limit: RateLimit | None = None,
    deterministic: bool = False,
    requirements: Sequence[str] = (),
) -> Callable[[Any], UDF]:
    """Make a UDF of groups from a class whose methods fold rows into a state, so that a touched group costs its change.

    A refresh keeps the state of each group beside its value, and gives the methods only the rows that were added since.
    The value must not depend on the order of the rows. The class is instantiated without arguments, once per process,
    and has these methods:

    - `init(self)` returns the state of no rows.
    - `add(self, state, column, ...)` returns the state with more rows. As in `udf`, annotations determine whether it
      gets lists (or no annotations), a `pa.Array` per column, or one `pa.RecordBatch`. Rows come in batches.
    - `merge(self, state, other)` returns the state of the rows of both.
    - `finish(self, state)` returns the value.
    - `remove(self, state, column, ...)`, optional, returns the state without rows that were added. Without it, a group
      that lost rows is computed from all of its rows.

    Args:
        data_type: Arrow type of the value.
        state: Arrow type of the state. A state takes at most 1 MB.
        name, version, deps, input_columns, num_cpus, num_gpus, memory: see `udf`. By default, the parameters of `add`
            after the state name the input columns.
        on_error, timeout, setup_timeout, cost, limit, deterministic, requirements: see `udf`; a call is the computation
            of one group.

    Raises:
        InvalidInput: an argument is not valid, or the class lacks a method.

    Example:
        ```python
        @udaf(data_type=pa.float64(), state=pa.struct([("total", pa.float64()), ("rows", pa.int64())]))
        class Mean:
            def init(self):
                return {"total": 0.0, "rows": 0}

            def add(self, state, amount: list[float]):
                return {"total": state["total"] + sum(amount), "rows": state["rows"] + len(amount)}

            def merge(self, state, other):
                return {key: state[key] + other[key] for key in state}

            def finish(self, state):
                return state["total"] / state["rows"]
        ```
    """
    module = sys._getframe(1).f_globals.get("__name__", "__main__")

    def make(func: Any) -> UDF:
        own_name = getattr(func, "__name__", type(func).__name__)
        chosen = check_name("name", own_name.strip("<>") if name is None else name)
        found = _read_methods(func, chosen)
        for what, kind in (("data_type", data_type), ("state", state)):
            if not isinstance(kind, pa.DataType) or pa.types.is_null(kind):
                raise InvalidInput(f"UDF {chosen!r} has {what}={kind!r}. Give an Arrow type, such as pa.int64().")
        fold = Fold(data_type, state, found, callable(getattr(func, "remove", None)))
        inputs = None if input_columns is None else check_sequence("input_columns", input_columns)
        if inputs is None and not found.takes_batches:
            inputs = found.required
        return UDF(
            func=func,
            name=chosen,
            data_type=data_type,
            signature=Signature("batches", ("rows",), ("rows",), False, {}, UNKNOWN),
            module=module,
            version=None if version is None else check_name("version", version),
            deps=check_sequence("deps", deps),
            input_columns=inputs,
            num_cpus=check_number("num_cpus", num_cpus, above_zero=True),
            num_gpus=check_number("num_gpus", num_gpus, above_zero=False),
            memory=check_memory(memory),
            on_error=check_policy(on_error),
            timeout=check_number("timeout", timeout, above_zero=True),
            setup_timeout=check_number("setup_timeout", setup_timeout, above_zero=True),
            cost=check_number("cost", cost, above_zero=False),
            limit=check_limit(limit),
            deterministic=check_flag("deterministic", deterministic),
            requirements=check_requirements(requirements),
            fold=fold,
        )

    return make


def _read_methods(func: Any, name: str) -> Signature:
    """Return the signature of `add`, whose first parameter is the state."""
    lacking = [method for method in _NEEDED if not callable(getattr(func, method, None))]
    if isinstance(func, UDF) or lacking:
        raise InvalidInput(
            f"@udaf is for a class with the methods init, add, merge and finish, and perhaps remove. {name!r} lacks "
            f"{', '.join(lacking) or 'them'}."
        )
    for method in (*_NEEDED, "remove"):
        plain = inspect.unwrap(getattr(func, method, print))
        if inspect.iscoroutinefunction(plain) or inspect.isgeneratorfunction(plain):
            raise InvalidInput(f"The method {method} of UDF {name!r} is async or yields. Give a plain method.")
    owner = func if isinstance(func, type) else type(func)
    for method, states in _STATES.items():
        plain = inspect.getattr_static(owner, method)
        if isinstance(plain, types.FunctionType) and not _takes(plain, 1 + len(states)):
            given = ", ".join(("self", *states))
            raise InvalidInput(f"The method {method} of UDF {name!r} does not fit. Write it as {method}({given}).")
    found = _after_state(owner, "add", name)
    if found.form == "batches" or found.takes_any_number:
        raise InvalidInput(
            f"The method add of UDF {name!r} takes a state, and then a parameter for each column, as in "
            "add(self, state, amount), or one pa.RecordBatch."
        )
    if callable(getattr(owner, "remove", None)):
        removed = _after_state(owner, "remove", name)
        names = found.takes_batches or removed.required == found.required
        if removed.form != found.form or not names:
            raise InvalidInput(
                f"The method remove of UDF {name!r} gets the same columns as add, and in the same form. Give it the "
                f"parameters of add after the state, {list(found.required)!r}, with the same annotations."
            )
    return found


def _after_state(owner: type, method: str, name: str) -> Signature:
    """Return the signature of a method without `self` and the state."""
    plain = getattr(owner, method)
    if not _takes(plain, 2, and_more=True):
        raise InvalidInput(
            f"The method {method} of UDF {name!r} does not fit. Write it as {method}(self, state, ...), with a "
            "parameter for each column."
        )
    return read_signature(partial(plain, None, None), name)


def _takes(function: Any, count: int, and_more: bool = False) -> bool:
    """Whether it can be called with a number of positional arguments, or, if it takes more, with these and others."""
    signature = signature_of(function)
    try:
        (signature.bind_partial if and_more else signature.bind)(*[None] * count)
    except TypeError:
        return False
    return True
