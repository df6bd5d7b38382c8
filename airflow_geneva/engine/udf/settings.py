"""The settings of a UDF: their checks, and the definition that a column stores."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from airflow_geneva.engine.storage.documents import parse, well_typed
from airflow_geneva.engine.udf.expect import Expectation
from airflow_geneva.engine.udf.signature import Form, Signature, read_signature
from airflow_geneva.errors import InvalidInput

DEFAULT_IN_FLIGHT = 16
DEFAULT_SUBMITTED, DEFAULT_POLL_INTERVAL, DEFAULT_VISIBLE_AFTER = 10_000, 60.0, 60.0
"""Defaults of a batch API: rows of a batch, seconds between polls, and seconds until the service lists a batch."""

_FORMAT = 1

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])?(?:i?b)?", re.IGNORECASE)


def check_name(setting: str, value: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidInput(
            f"{setting}={value!r} of a UDF: give up to 128 letters, digits, '_', '-', '+' and '.', "
            "beginning with a letter, digit or '_'."
        )
    return value


def check_sequence(setting: str, value: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidInput(f"{setting}={value!r} of a UDF: give a list, such as [{value!r}].")
    found = tuple(value)
    if setting == "input_columns" and not (found and all(isinstance(column, str) and column for column in found)):
        raise InvalidInput(f"input_columns={value!r} of a UDF: give the names of one or more columns.")
    return found


def check_rows(setting: str, value: int | None) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise InvalidInput(f"{setting}={value!r}: give a number of rows of at least 1, or None.")
    return value


def check_bounds(minimum: int | None, size: int | None, maximum: int | None) -> None:
    """Check that the given sizes ascend."""
    sizes = {"min_checkpoint_size": minimum, "checkpoint_size": size, "max_checkpoint_size": maximum}
    given = [(setting, value) for setting, value in sizes.items() if value is not None]
    for (low, low_value), (high, high_value) in itertools.pairwise(given):
        if low_value > high_value:
            raise InvalidInput(f"{low}={low_value} is above {high}={high_value}. Lower the first, or raise the second.")


def check_number(setting: str, value: float | None, above_zero: bool) -> float | None:
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (above_zero and value == 0):
        raise InvalidInput(f"{setting}={value!r}: give a number {'above' if above_zero else 'of at least'} 0, or None.")
    return value


def check_calls(is_async: bool, value: int | None, name: str) -> int | None:
    if value is not None and not is_async:
        raise InvalidInput(
            f"UDF {name!r} has max_in_flight={value!r}, and is a plain function, which is called once at a time. "
            "Make it `async def`, or leave max_in_flight out."
        )
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise InvalidInput(f"max_in_flight={value!r}: give a number of calls of at least 1, or None.")
    return DEFAULT_IN_FLIGHT if is_async and value is None else value


def check_workers(preprocesses: bool, workers: int | None, num_cpus: float | None, name: str) -> float | None:
    """Check the number of processes of a UDF's stage; return the UDF's CPUs, at least one for each process."""
    cpus = check_number("num_cpus", num_cpus, above_zero=True)
    if workers is None:
        return cpus
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise InvalidInput(f"preprocess_workers={workers!r}: give a number of processes of at least 1, or None.")
    if not preprocesses:
        raise InvalidInput(
            f"UDF {name!r} has preprocess_workers={workers}, and no stage that they could run. Give preprocess= too, "
            "or leave it out."
        )
    if cpus is not None and cpus < workers:
        raise InvalidInput(
            f"UDF {name!r} has preprocess_workers={workers} and num_cpus={cpus:g}, which do not cover them. Raise "
            "num_cpus, or leave it out: it is their number then."
        )
    return float(workers) if cpus is None else cpus


def check_batch_api(signature: Signature, chosen: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the settings that only a batch API has, and `batch_size`, which has another default there.

    Args:
        chosen: `batch_size`, `poll_interval` and `visible_after`, and settings that a batch API cannot have.
    """
    own = ("poll_interval", "visible_after")
    poll_interval = check_number("poll_interval", chosen["poll_interval"], above_zero=True)
    visible_after = check_number("visible_after", chosen["visible_after"], above_zero=False)
    batch_size = check_rows("batch_size", chosen["batch_size"])
    if not signature.is_batch_api:
        for setting in own:
            if chosen[setting] is not None:
                raise InvalidInput(
                    f"UDF {name!r} has {setting}={chosen[setting]!r}, and is no batch API, which has submit, poll and "
                    f"fetch. Leave {setting} out."
                )
        return {"batch_size": batch_size, **dict.fromkeys(own)}
    if given := [f"{setting}={value!r}" for setting, value in chosen.items() if setting in _NOT_OF_BATCHES and value]:
        raise InvalidInput(
            f"UDF {name!r} is a batch API, which cannot have {', '.join(given)}: the service has its own limits for "
            "batches, and a client its own timeout."
        )
    if poll_interval is not None and poll_interval > _LONGEST_POLL_INTERVAL:
        raise InvalidInput(
            f"poll_interval={poll_interval!r}: give at most {_LONGEST_POLL_INTERVAL:,.0f} seconds. A job that shows no "
            "sign of life for a day counts as dead."
        )
    return {
        "batch_size": batch_size or DEFAULT_SUBMITTED,
        "poll_interval": poll_interval or DEFAULT_POLL_INTERVAL,
        "visible_after": DEFAULT_VISIBLE_AFTER if visible_after is None else visible_after,
    }


_NOT_OF_BATCHES = ("timeout", "limit", "dedup")
_LONGEST_POLL_INTERVAL = 12 * 3600.0


def check_batches(
    signature: Signature,
    batch_by: Callable[..., Any] | str | None,
    batch_limit: float | None,
    out_of_memory: type[Exception] | Iterable[type[Exception]],
    name: str,
) -> dict[str, Any]:
    """Return the settings for cutting calls and for recognizing calls that are too large for a device."""
    kinds = (out_of_memory,) if isinstance(out_of_memory, type) else tuple(out_of_memory)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
        raise InvalidInput(f"out_of_memory={out_of_memory!r}: give an exception class, or several.")
    limit = check_number("batch_limit", batch_limit, above_zero=True)
    if limit is not None and batch_by is None:
        raise InvalidInput(
            f"UDF {name!r} has batch_limit={batch_limit!r}, and batch_by does not say what a row weighs. Give "
            "batch_by=len, for example, or a number of rows as batch_size."
        )
    given = {"batch_by": batch_by, "out_of_memory": kinds}
    if wrong := [setting for setting, value in given.items() if value]:
        if signature.is_batch_api:
            raise InvalidInput(f"UDF {name!r} is a batch API, which cannot have {wrong[0]}: it is called on one batch.")
        if signature.form == "scalar":
            raise InvalidInput(
                f"UDF {name!r} has {wrong[0]}, and is called on one row at a time. Let it take whole batches: annotate "
                "its parameters as pa.Array, or take one pa.RecordBatch."
            )
    if batch_by is not None and not isinstance(batch_by, str):
        _check_weighing(batch_by, signature, name)
    return {"batch_by": batch_by, "batch_limit": limit, "out_of_memory": kinds}


def _check_weighing(batch_by: Callable[..., Any], signature: Signature, name: str) -> None:
    try:
        found = read_signature(batch_by, "batch_by")
    except (InvalidInput, TypeError, ValueError) as error:
        raise InvalidInput(
            f"batch_by={batch_by!r} of UDF {name!r} is no function of a row's inputs, nor the name of one ({error})."
        ) from error
    inputs = len(signature.required)
    fits = found.takes_any_number or len(found.required) <= inputs <= len(found.parameters)
    if found.is_async or (found.form != "record_batch" and signature.form == "array" and not fits):
        raise InvalidInput(
            f"batch_by={batch_by!r} of UDF {name!r} takes {list(found.parameters)!r}. Give a plain function that takes "
            f"what the UDF takes: {list(signature.required)!r}."
        )


def check_setup_timeout(signature: Signature, value: float | None, name: str) -> float | None:
    if value is not None and (signature.is_async or signature.is_batch_api):
        kind = "async" if signature.is_async else "a batch API"
        raise InvalidInput(
            f"UDF {name!r} is {kind} and runs in the process of its task, which is not ended. Leave setup_timeout out."
        )
    return check_number("setup_timeout", value, above_zero=True)


def check_flag(setting: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{setting}={value!r}: give True or False.")
    return value


def check_memory(value: int | str | None, setting: str = "memory") -> int | None:
    """Return bytes for a number, or for a text such as "512m" or "4g" (powers of 1,024)."""
    amount: float | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        amount = value
    elif isinstance(value, str) and (match := _MEMORY.fullmatch(value.strip())):
        amount = float(match[1]) * 1024 ** " kmgt".index((match[2] or " ").lower())
    if value is not None and (amount is None or amount < 1):
        raise InvalidInput(f'{setting}={value!r}: give bytes above 0, or a text such as "512m" or "4g".')
    return None if amount is None else int(amount)


@dataclass(frozen=True)
class UdfDefinition:
    """The definition of a UDF in its column's metadata: plain values, no code; `data_type` is text for display.

    With `reports_cost`, calls report their cost. `connection` names the connection of the service that the function
    calls, which Airflow tasks look up. `groups` is the form in which it takes the rows of a group, if it is called once
    per group. `requirements` are the packages that its process must have. `removes` says, of a UDF that can be folded,
    whether rows can be removed from its state.
    """

    name: str
    version: str
    import_path: str | None
    input_columns: tuple[str, ...] | None
    data_type: str
    form: Form
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: int | None = None
    batch_size: int | None = None
    checkpoint_size: int | None = None
    min_checkpoint_size: int | None = None
    max_checkpoint_size: int | None = None
    on_error: str | list[dict[str, Any]] = "fail"
    timeout: float | None = None
    cost: float | None = None
    max_in_flight: int | None = None
    poll_interval: float | None = None
    deterministic: bool | None = None
    dedup: bool | None = None
    expect: list[dict[str, Any]] | None = None
    reports_cost: bool | None = None
    connection: str | None = None
    groups: Form | None = None
    requirements: list[str] | None = None
    removes: bool | None = None

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        """The expectations on its values, without the functions of `satisfies`."""
        return tuple(map(Expectation.from_json, self.expect or ()))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the inputs; an input may be a field of a struct, such as `chunk.text`."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.input_columns or ()))

    @property
    def call(self) -> str:
        """Describes for display how it computes its column."""
        return f"{self.function_name}({', '.join(self.input_columns or ())}), version {self.version}"

    @property
    def function_name(self) -> str:
        """Names the function for display: by its import path, or its name."""
        return self.import_path or self.name

    def to_json(self) -> str:
        """Return the definition as JSON with sorted keys, without None values."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps({"format": _FORMAT, **values}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> UdfDefinition:
        """Parse the output of `to_json`; `InvalidInput` if it is something else, or of a later format."""
        try:
            values = parse(text)
            found = values.pop("format")
            if found != _FORMAT:
                raise InvalidInput(
                    f"A UDF definition has format {found!r}; this version of airflow-geneva reads format "
                    f"{_FORMAT}. Upgrade airflow-geneva."
                )
            known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
            inputs = values.get("input_columns")
            known["input_columns"] = None if inputs is None else tuple(inputs)
            definition = well_typed(cls(**{"import_path": None, **known}))
            _ = definition.expectations
            return definition
        except InvalidInput:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidInput(f"This is not a stored UDF definition ({error!r}): {text!r:.200}") from error
