"""How a UDF is called, according to its parameters and annotations."""

from __future__ import annotations

import collections.abc
import inspect
import sys
import types
import typing
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.code_hash.values import cells_of
from airflow_geneva.errors import InvalidInput

Form = Literal["scalar", "array", "record_batch", "batches"]

UNKNOWN = inspect.Parameter.empty
"""Stands for a missing annotation, or one that cannot be resolved."""

_BATCH_API = ("submit", "poll", "fetch")
_ITERABLES = (collections.abc.Iterator, collections.abc.Iterable, collections.abc.Generator)


@dataclass(frozen=True)
class Signature:
    """How a UDF is called.

    Attributes:
        form: "scalar" (Python values of one row), "array" (one `pa.Array` per column), "record_batch", or "batches" (an
            iterator of record batches, which only a group of rows is passed as).
        required: parameters without a default value, in order; `parameters`: all that can take a column.
        takes_any_number: whether there is a `*args`.
        annotations: by parameter, as far as they can be resolved.
        result: annotation of the result, or `UNKNOWN`; for a generator (`yields`), a list of its item type.
        is_async: whether a call returns a coroutine.
        is_batch_api: whether it is a batch API, whose `submit` has these parameters.
        takes_key: whether `submit` takes a key besides the batch.
        groups: if it is called once per group, like a scalar UDF once per row: the form in which it takes a group's
            rows, "scalar" for Python lists; else None.
    """

    form: Form
    required: tuple[str, ...]
    parameters: tuple[str, ...]
    takes_any_number: bool
    annotations: dict[str, Any]
    result: Any
    yields: bool = False
    is_async: bool = False
    is_batch_api: bool = False
    takes_key: bool = False
    groups: Form | None = None

    @property
    def takes_batches(self) -> bool:
        """Whether its only parameter takes all input columns."""
        return (self.groups or self.form) in ("record_batch", "batches")

    @property
    def takes_groups_only(self) -> bool:
        """Whether it cannot compute a value for each row: it takes an iterator of batches, or yields from columns."""
        return self.groups is None and (self.form == "batches" or (self.yields and self.form != "scalar"))

    def annotation_at(self, position: int) -> Any:
        """Return the annotation of the parameter that gets the input column at this position, or `UNKNOWN`."""
        name = self.parameters[position] if position < len(self.parameters) else "*"
        return self.annotations.get(name, UNKNOWN)

    def takes_numpy(self, position: int) -> bool:
        """Whether the parameter that gets the input column at this position takes a NumPy array for a list."""
        members = union_members(self.annotation_at(position))
        return any(getattr(member, "__origin__", member) is np.ndarray for member in members)


def read_signature(func: Any, name: str) -> Signature:
    """Read the signature of a function, or of `__call__` of a class or instance."""
    has_own_call = isinstance(func, type) or isinstance(type(func).__call__, types.FunctionType)
    function = func.__call__ if has_own_call else func
    plain = inspect.unwrap(function)
    if inspect.isasyncgenfunction(plain):
        raise InvalidInput(f"UDF {name!r} is an async generator. Give an async function that returns a list.")
    parameters = list(signature_of(function).parameters.values())
    if isinstance(func, type):
        parameters = parameters[1:]
    hints = _resolve_hints(function)
    annotations, required, positional, any_number = {}, [], [], False
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            any_number, key = True, "*"
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            key = parameter.name
            positional.append(key)
            if parameter.default is inspect.Parameter.empty:
                required.append(key)
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is inspect.Parameter.empty:
            raise InvalidInput(
                f"UDF {name!r} has the keyword-only parameter {parameter.name!r} without a default. "
                "Columns are given by position: remove the '*', or give it a default."
            )
        else:
            continue
        if parameter.name in hints:
            annotations[key] = hints[parameter.name]
    if not positional and not any_number:
        raise InvalidInput(f"UDF {name!r} has no parameters. Give it one for each input column.")
    form = _form(annotations, name)
    if form in ("record_batch", "batches") and len(required) != 1:
        what = "pa.RecordBatch" if form == "record_batch" else "Iterator[pa.RecordBatch]"
        raise InvalidInput(f"UDF {name!r} takes {what} and {required!r}. Give it one {what} parameter.")
    result = hints.get("return", UNKNOWN)
    yields = inspect.isgeneratorfunction(plain)
    is_async = inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(function)
    if yields:
        item = typing.get_args(result)
        result = list[item[0]] if item and typing.get_origin(result) in _ITERABLES else UNKNOWN  # type: ignore[valid-type]
    return Signature(form, tuple(required), tuple(positional), any_number, annotations, result, yields, is_async)


def is_batch_api(func: Any) -> bool:
    """Whether it is a class, or an instance of one, that submits batches and fetches their results later."""
    return all(callable(getattr(func, method, None)) for method in _BATCH_API)


def read_batch_api(func: Any, name: str) -> Signature:
    """Read the signature of a batch API: ``submit(batch)`` or ``submit(batch, key)``, ``poll(handle)`` and so on."""
    methods = {method: getattr(func, method) for method in (*_BATCH_API, "find") if hasattr(func, method)}
    parameters = {method: list(signature_of(function).parameters) for method, function in methods.items()}
    if isinstance(func, type):
        parameters = {method: names[1:] for method, names in parameters.items()}
    bad = [method for method, names in parameters.items() if not 1 <= len(names) <= 1 + (method == "submit")]
    bad += [method for method, function in methods.items() if inspect.iscoroutinefunction(inspect.unwrap(function))]
    if (
        _resolve_hints(methods["submit"]).get(next(iter(parameters["submit"]), ""), pa.RecordBatch)
        is not pa.RecordBatch
    ):
        bad.append("submit")
    if bad:
        raise InvalidInput(
            f"UDF {name!r} is a batch API, and its methods {sorted(set(bad))!r} do not fit. Give plain methods "
            "submit(self, batch: pa.RecordBatch), or with a second parameter that takes a key, poll(self, handle), "
            "fetch(self, handle), and if the service can look for a batch by its key, find(self, key)."
        )
    batch, *key = parameters["submit"]
    annotations = {batch: pa.RecordBatch}
    return Signature(
        "record_batch", (batch,), (batch,), False, annotations, UNKNOWN, is_batch_api=True, takes_key=bool(key)
    )


def signature_of(function: Any) -> inspect.Signature:
    """Return the signature of a function whose annotations need not be resolvable."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def _resolve_hints(function: Any) -> dict[str, Any]:
    """Return annotations as objects without type aliases, as far as they can be resolved."""
    hints = {}
    for name, hint in _written_hints(function).items():
        with suppress(Exception):  # evaluating an alias runs user code
            hints[name] = without_aliases(hint)
    return hints


def _written_hints(function: Any) -> dict[str, Any]:
    plain = inspect.unwrap(getattr(function, "__func__", getattr(function, "func", function)))
    if not isinstance(plain, types.FunctionType):
        return {}
    enclosing = cells_of([plain])
    with suppress(Exception):
        return typing.get_type_hints(plain, localns={**plain.__globals__, **enclosing})
    signature = signature_of(plain)
    hints = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    hints["return"] = signature.return_annotation
    resolved = {}
    for name, hint in hints.items():
        with suppress(Exception):  # the text is the function's own annotation, not input from outside
            resolved[name] = eval(hint, plain.__globals__, enclosing) if isinstance(hint, str) else hint  # noqa: S307
    return {name: hint for name, hint in resolved.items() if hint is not UNKNOWN}


def _form(annotations: dict[str, Any], name: str) -> Form:
    forms: dict[Form, list[str]] = {}
    for parameter, annotation in annotations.items():
        for part in union_members(annotation):
            if part in (pa.Table, pa.ChunkedArray):
                fitting = "pa.RecordBatch" if part is pa.Table else "pa.Array"
                raise InvalidInput(
                    f"UDF {name!r} annotates {parameter!r} as pa.{part.__name__}, which UDFs never get. "
                    f"Annotate it as {fitting}."
                )
            whole_column = isinstance(part, type) and issubclass(part, pa.Array)
            form: Form = "array" if whole_column else "record_batch" if part is pa.RecordBatch else "scalar"
            if typing.get_origin(part) in _ITERABLES and typing.get_args(part)[:1] == (pa.RecordBatch,):
                form = "batches"
            forms.setdefault(form, []).append(parameter)
    if len(forms) > 1:
        said = ", ".join(f"{', '.join(map(repr, names))} as {form}" for form, names in sorted(forms.items()))
        raise InvalidInput(
            f"UDF {name!r} mixes forms: {said}. Annotate all parameters as Python values, all as pa.Array, "
            "or take one pa.RecordBatch."
        )
    return next(iter(forms), "scalar")


def union_members(annotation: Any) -> list[Any]:
    """Return the members of a union without None, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [member for member in typing.get_args(annotation) if member is not type(None)]
    return [annotation]


def without_aliases(annotation: Any) -> Any:
    """Expand all type aliases in an annotation, such as `type Vector = ...` and NumPy's `NDArray`.

    A recursive alias becomes `Any` where it refers to itself.
    """
    return _expand(annotation, {}, ())


def _expand(annotation: Any, given: dict[Any, Any], inside: tuple[Any, ...]) -> Any:
    origin = typing.get_origin(annotation)
    alias = annotation if origin is None else origin
    if origin is typing.Annotated:
        return _expand(annotation.__origin__, given, inside)
    arguments = typing.get_args(annotation)
    if origin in (typing.Literal, collections.abc.Callable):
        return annotation
    expanded = tuple(_expand(argument, given, inside) for argument in arguments)
    if type(alias).__name__ == "TypeAliasType":  # from typing, or from typing_extensions
        if alias in inside:
            return Any
        return _expand(alias.__value__, dict(zip(alias.__type_params__, expanded, strict=False)), (*inside, alias))
    if isinstance(annotation, typing.TypeVar):
        return given.get(annotation, annotation)
    if all(new is old for new, old in zip(expanded, arguments, strict=True)):
        return annotation
    return typing.Union[expanded] if origin in (typing.Union, types.UnionType) else origin[expanded]  # noqa: UP007
