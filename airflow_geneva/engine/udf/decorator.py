"""The `udf` decorator, and the `UDF` that it makes from a Python function."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from inspect import getattr_static
from typing import Any, overload

import pyarrow as pa

from airflow_geneva.engine.code_hash.hasher import code_version, identity_of_code
from airflow_geneva.engine.lance_io.arrays import is_list
from airflow_geneva.engine.limits.rate_limit import RateLimit, check_limit
from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.udf.annotations import accepts, output_type
from airflow_geneva.engine.udf.error_policy import Fail, Policy, Retry, Skip, check_policy, describe_policy
from airflow_geneva.engine.udf.expect import Expectation, check_expectations
from airflow_geneva.engine.udf.fold import Fold, FoldedCall
from airflow_geneva.engine.udf.packages import check_requirements
from airflow_geneva.engine.udf.settings import (
    UdfDefinition,
    check_batch_api,
    check_batches,
    check_bounds,
    check_calls,
    check_flag,
    check_memory,
    check_name,
    check_number,
    check_rows,
    check_sequence,
    check_setup_timeout,
    check_workers,
)
from airflow_geneva.engine.udf.signature import (
    Form,
    Signature,
    is_batch_api,
    read_batch_api,
    read_signature,
    union_members,
)
from airflow_geneva.errors import InvalidInput

IMPORT_PATH = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")

_instances: ProcessMemo[tuple[type, asyncio.AbstractEventLoop | None], Any] = ProcessMemo()
"""Instances of UDFs' classes. They are the process's: a model that one job has loaded is not loaded by the next one."""


@dataclass(frozen=True)
class UDF:
    """A function that computes a column; created by the decorator `udf`, and called like the function itself.

    Attributes:
        func: the function, class or instance that was decorated.
        name: name in checkpoints, plans and messages.
        data_type: Arrow type of its output.
        signature: its parameters, annotations and form.
        module: the module that applied the decorator.
        preprocess: its stage, which makes its input from the input columns, or None.
        fold: how its methods fold the rows of a group, if `udaf` made it, or None.
        method_of: the class on whose instance the function is called as a method, or None.
        plain: the UDF as it was decorated, if this is its `of_groups`.

    The other attributes are the arguments of `udf`, or None.
    """

    func: Any
    name: str
    data_type: pa.DataType
    signature: Signature = field(compare=False, repr=False)
    module: str = field(compare=False, repr=False)
    version: str | None = None
    deps: tuple[Any, ...] = field(default=(), repr=False)
    input_columns: tuple[str, ...] | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: int | None = None
    batch_size: int | None = None
    batch_by: Any = None
    batch_limit: float | None = None
    checkpoint_size: int | None = None
    min_checkpoint_size: int | None = None
    max_checkpoint_size: int | None = None
    on_error: Policy = "fail"
    timeout: float | None = None
    setup_timeout: float | None = None
    out_of_memory: tuple[type[Exception], ...] = ()
    cost: float | None = None
    max_in_flight: int | None = None
    poll_interval: float | None = None
    visible_after: float | None = None
    limit: RateLimit | None = None
    deterministic: bool = False
    dedup: bool = False
    expect: tuple[Expectation, ...] = ()
    preprocess: UDF | None = None
    preprocess_workers: int | None = None
    requirements: tuple[str, ...] = ()
    method_of: type | None = field(default=None, compare=False, repr=False)
    fold: Fold | None = field(default=None, compare=False, repr=False)
    plain: UDF | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.func.__doc__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's function; a class is instantiated once per process, on the first call."""
        if self.is_batch_api:
            raise InvalidInput(
                f"UDF {self.name!r} is a batch API, which a job calls. Call its methods: .function.submit."
            )
        return self.function(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        return self.func

    @property
    def form(self) -> Form:
        """The form of its calls: "scalar", "array" or "record_batch"."""
        return self.signature.form

    @property
    def groups(self) -> Form | None:
        """The form in which it takes the rows of a group, if it is called once per group; else None."""
        return self.signature.groups

    @property
    def of_groups(self) -> UDF:
        """The UDF as a view of groups calls it: once per group, as a scalar UDF is called once per row.

        Raises:
            InvalidInput: it cannot be called with the rows of a group.
        """
        if self.plain is not None:
            return self
        if why := self._why_not_of_groups():
            raise InvalidInput(f"UDF {self.name!r} {why}")
        kind = self.data_type if self.fold is None else self.fold.result
        signature = replace(self.signature, form="scalar", groups=self.form)
        return replace(self, signature=signature, data_type=kind, plain=self)

    def _why_not_of_groups(self) -> str:
        if self.is_batch_api:
            return (
                "is a batch API, which takes rows and not groups. Make a view of groups with its inputs, and a view of "
                "that with the batch API."
            )
        if self.preprocess is not None or self.batch_by is not None:
            setting = "preprocess" if self.preprocess is not None else "batch_by"
            return f"has {setting}, which is for calls on batches, and would be called once per group. Leave it out."
        if self.is_async and self.form == "batches":
            return (
                "is async and takes an iterator, whose batches are read while the event loop waits. Give a plain "
                "function, or take pa.Array or pa.RecordBatch."
            )
        arrays = [
            one for one in union_members(self.signature.result) if isinstance(one, type) and issubclass(one, pa.Array)
        ]
        if arrays and not is_list(self.data_type):
            return (
                f"is annotated to return a {arrays[0].__name__}, and is called once per group, for one value. Annotate "
                "the type of that value."
            )
        return ""

    @property
    def is_async(self) -> bool:
        """Whether it is an `async def` function; a direct call returns its coroutine."""
        return self.signature.is_async

    @property
    def is_batch_api(self) -> bool:
        """Whether it submits batches, and fetches their results once a service has them."""
        return self.signature.is_batch_api

    @property
    def reports_cost(self) -> bool | None:
        """True if its calls report their cost, like those of a ready-made function with a price; else None."""
        return getattr(self.func, "reports_cost", None) is True or None

    @property
    def removes(self) -> bool | None:
        """Whether rows can be removed from its state; None if it cannot be folded."""
        return None if self.fold is None else self.fold.removes

    @property
    def connection(self) -> str | None:
        """The connection of the service that a ready-made function calls; None: the default one."""
        found = getattr(self.func, "connection", None)
        return found if isinstance(found, str) else None

    @property
    def needs_process(self) -> bool:
        """Whether its calls run in a process of their own, which may be killed; async calls are cancelled instead."""
        apart = self.on_error != "fail" or self.timeout is not None or self.setup_timeout is not None
        return apart and not (self.is_async or self.is_batch_api)

    @property
    def function(self) -> Callable[..., Any]:
        """The callable: the function, or this process's instance of the class; a generator is collected into a list."""
        function: Callable[..., Any] = self.func
        if self.method_of is not None:
            function = partial(self.func, _instance(self.method_of))
        elif isinstance(self.func, type):
            # A client of an async class belongs to the event loop in which it was made.
            function = _instance(self.func, _running_loop() if self.is_async else None)
        if self.fold is not None:
            return FoldedCall(self.fold, self.name, function)
        return partial(_collect, function) if self.signature.yields else function

    @property
    def input_stage(self) -> UDF:
        """The UDF that gets the input columns: its stage, or itself."""
        return self.preprocess or self

    @property
    def stage(self) -> UDF | None:
        """Its stage as a job runs it: with this UDF's error policy, timeouts and version."""
        if self.preprocess is None:
            return None
        return replace(
            self.preprocess,
            version=self.code_version,
            on_error=self.on_error,
            timeout=self.timeout,
            setup_timeout=self.setup_timeout,
        )

    @property
    def without_stage(self) -> UDF:
        """The UDF without its stage, with the stage's value as its input."""
        if self.preprocess is None:
            return self
        takes = None if self.signature.takes_batches else self.signature.parameters[:1]
        return replace(self, preprocess=None, preprocess_workers=None, version=self.code_version, input_columns=takes)

    @property
    def batch_unit(self) -> str:
        """The unit of a call's size: rows, or the name of `batch_by`."""
        if self.batch_by is None or isinstance(self.batch_by, str):
            return self.batch_by or "rows"
        return str(getattr(self.batch_by, "__qualname__", type(self.batch_by).__qualname__))

    @cached_property
    def code_version(self) -> str:
        """The given version, or the code hash, which is equal in all processes; `InvalidInput` if it has none."""
        return self.version or code_version(self.func, self.deps, self.name, preprocess=self.preprocess)

    @cached_property
    def value_identity(self) -> str:
        """Identifies its values among UDFs with equal name and version: its import path, or a hash of its code.

        A process without its source, such as a worker that runs a notebook's function, gets the value with the object.
        """
        return self.import_path or identity_of_code(self.func, self.preprocess)

    @property
    def import_path(self) -> str | None:
        """`"module:name"` from which another process imports this object; None in a notebook or inside a function."""
        if self.plain is not None:
            return self.plain.import_path
        for module_name in (self.module, getattr(self.func, "__module__", "")):
            module = sys.modules.get(module_name)
            # Airflow imports a DAG file under its own module name, which no other process has.
            if module is None or module_name == "__main__" or module_name.startswith("unusual_prefix_"):
                continue
            names = [name for name, value in vars(module).items() if value is self]
            for name in (getattr(self.func, "__qualname__", ""), *names):
                path = f"{module_name}:{name}"
                # runpy runs a script in a temporary module such as "<run_path>".
                if name and IMPORT_PATH.fullmatch(path) and find_in_module(module, name) is self:
                    return path
        return None

    def resolve_inputs(self, input_columns: Sequence[str] | None = None) -> tuple[str, ...] | None:
        """Return the input columns in the order of the parameters; None: a batch with all columns."""
        given = self.input_columns if input_columns is None else tuple(input_columns)
        if self.preprocess is not None:
            self._check_weight(None if self.signature.takes_batches else self.signature.parameters[:1])
            return self.preprocess.resolve_inputs(given)
        if self.signature.takes_batches:
            self._check_weight(given)
            if self.fold is not None and given is not None:
                self.fold.check_count(given, self.name)
            return given
        columns = self.signature.required if given is None else given
        if given is None and self.signature.takes_any_number and not columns:
            raise InvalidInput(f"UDF {self.name!r} takes any number of columns. Name them: @udf(input_columns=[...]).")
        _check_count(self.signature, columns, self.name)
        self._check_weight((*columns, *self.signature.parameters[: len(columns)]))
        return columns

    def _check_weight(self, inputs: Sequence[str] | None) -> None:
        if isinstance(self.batch_by, str) and inputs is not None and self.batch_by not in inputs:
            raise InvalidInput(
                f"UDF {self.name!r} has batch_by={self.batch_by!r}, which is none of its inputs {list(inputs)!r}. Name "
                "one of them, or give a function that takes them."
            )

    def definition(self, input_columns: Sequence[str] | None = None) -> UdfDefinition:
        """Return the definition to store for a column that it computes from these columns."""
        stored = {setting.name: getattr(self, setting.name) for setting in fields(UdfDefinition)}
        stored |= {"input_columns": self.resolve_inputs(input_columns), "version": self.code_version}
        stored |= {"data_type": str(self.data_type), "on_error": describe_policy(self.on_error)}
        stored |= {"deterministic": self.deterministic or None, "dedup": self.dedup or None}
        stored["requirements"] = list(self.requirements) or None
        stored["expect"] = [one.to_json() for one in self.expect] or None
        return UdfDefinition(**stored)


@overload
def udf(func: Callable[..., Any], /) -> UDF: ...


@overload
def udf(
    *,
    data_type: pa.DataType | None = None,
    name: str | None = None,
    version: str | None = None,
    deps: Sequence[Any] = (),
    input_columns: Sequence[str] | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    memory: int | str | None = None,
    batch_size: int | None = None,
    batch_by: Callable[..., Any] | str | None = None,
    batch_limit: float | None = None,
    checkpoint_size: int | None = None,
    min_checkpoint_size: int | None = None,
    max_checkpoint_size: int | None = None,
    on_error: str | Sequence[Retry | Skip | Fail] = "fail",
    timeout: float | None = None,
    setup_timeout: float | None = None,
    out_of_memory: type[Exception] | Sequence[type[Exception]] = (),
    cost: float | None = None,
    max_in_flight: int | None = None,
    poll_interval: float | None = None,
    visible_after: float | None = None,
    limit: RateLimit | None = None,
    deterministic: bool = False,
    dedup: bool | None = None,
    expect: Expectation | Sequence[Expectation] = (),
    preprocess: Callable[..., Any] | str | None = None,
    preprocess_workers: int | None = None,
    requirements: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], UDF]: ...


def udf(
    func: Callable[..., Any] | None = None,
    /,
    *,
    data_type: pa.DataType | None = None,
    name: str | None = None,
    version: str | None = None,
    deps: Sequence[Any] = (),
    input_columns: Sequence[str] | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    memory: int | str | None = None,
    batch_size: int | None = None,
    batch_by: Callable[..., Any] | str | None = None,
    batch_limit: float | None = None,
    checkpoint_size: int | None = None,
    min_checkpoint_size: int | None = None,
    max_checkpoint_size: int | None = None,
    on_error: str | Sequence[Retry | Skip | Fail] = "fail",
    timeout: float | None = None,
    setup_timeout: float | None = None,
    out_of_memory: type[Exception] | Sequence[type[Exception]] = (),
    cost: float | None = None,
    max_in_flight: int | None = None,
    poll_interval: float | None = None,
    visible_after: float | None = None,
    limit: RateLimit | None = None,
    deterministic: bool = False,
    dedup: bool | None = None,
    expect: Expectation | Sequence[Expectation] = (),
    preprocess: Callable[..., Any] | str | None = None,
    preprocess_workers: int | None = None,
    requirements: Sequence[str] = (),
) -> UDF | Callable[[Callable[..., Any]], UDF]:
    """Make a UDF from a function, a class with `__call__`, or an instance of such a class.

    The annotations determine how it is called: with the Python values of one row (`text: str`, or no annotations), with
    one `pa.Array` per column (`x: pa.Int64Array`), or with one `pa.RecordBatch`. In a view of groups, a call gets all
    rows of one group, as `pa.Array`s, lists (`text: list[str]`), one `pa.RecordBatch`, or an `Iterator[pa.RecordBatch]`
    that reads a group of any size, and returns one value. A class is instantiated without arguments, once per process.
    Calls of an `async def` function run concurrently, in one event loop per process.
    A class with `submit`, `poll` and `fetch` is a batch API, which answers after minutes or hours.

    Args:
        data_type: Arrow type of the output; not needed if the return annotation determines it.
        name: name in checkpoints and messages; by default the function's name.
        version: replaces the code hash; change it whenever results change.
        deps: more things that the code hash covers: functions, classes, modules, strings, or `pathlib.Path`s of files.
        input_columns: columns for the parameters, in order; by default the parameters without a default value name
            them, and a record-batch UDF gets all columns that are not computed.
        num_cpus, num_gpus: CPUs and GPUs per call.
        memory: memory per call, in bytes or as `"4g"`.
        batch_size: rows per call.
        batch_by: the weight of a row, such as its number of tokens, pixels or bytes: a function with the same inputs,
            or the name of an input. Calls get rows of similar weight. It does not affect the code version.
        batch_limit: maximum weight of a call after padding: the weight of its heaviest row times its rows.
        checkpoint_size, min_checkpoint_size, max_checkpoint_size: rows per checkpoint.
        on_error: `"fail"`, `"skip"`, or a list of `Retry`, `Skip` and `Fail`; the first rule that matches applies.
        timeout: maximum seconds per call.
        setup_timeout: maximum seconds to start the function's process, import its module and instantiate its class.
        out_of_memory: exceptions that mean that a call has too many rows for the device's memory, besides those of
            PyTorch, JAX, TensorFlow and CUDA; such a call is halved.
        cost: cost of a row, for estimates and `max_cost`; use the same currency everywhere.
        max_in_flight: concurrent calls of an `async def` function in each process; by default 16.
        poll_interval: seconds between two polls of a batch API; by default 60.
        visible_after: seconds after which the service of a batch API lists every submitted batch; by default 60. Only
            then does a `find` that returns None mean that the service does not have the batch.
        limit: a `RateLimit` of the service that it calls. It does not affect the code version.
        deterministic: whether a row's value depends on nothing but the row's inputs and the code.
        dedup: whether to call the function only once for equal inputs, also across tasks and jobs; only for a
            deterministic function. By default True for a deterministic function with a `limit`.
        expect: expectations, from `airflow_geneva.expect`, which are checked before values become visible. They do not
            affect the code version: changing them recomputes nothing.
        preprocess: a function of the input columns that runs on CPUs ahead of the calls, for example to decode images
            or tokenize texts while a device works; an `async def` one, such as `read_file()`, runs for many rows at a
            time. Its value for a row is the only input of the decorated function. Its
            output type comes from its return annotation, or from its own `@udf(data_type=...)`. For a class, it may be
            the name of a method. Error policy and timeout apply to its calls too, and the code version covers it.
        preprocess_workers: number of processes for `preprocess`; by default it runs in `num_cpus` threads. Use
            processes if it holds Python's GIL. `num_cpus` is by default this number.
        requirements: packages that its process must have, as pip takes them: `["rapidocr==3.*"]`. A job checks them
            before the first row, on each machine. They do not affect the code version.

    Raises:
        InvalidInput: an argument is not valid, or contradicts the annotations.

    Example:
        ```python
        @udf(data_type=pa.int64())
        def length(text: str) -> int:
            return len(text)
        ```
    """
    module = sys._getframe(1).f_globals.get("__name__", "__main__")

    def make(func: Callable[..., Any]) -> UDF:
        called = callable(func) and ("__call__" in dir(func) or not isinstance(func, type))
        if isinstance(func, UDF) or not (called or is_batch_api(func)):
            raise InvalidInput(
                f"{func!r} cannot be made a UDF: give a function, or a class or object with __call__, or with submit, "
                "poll and fetch."
            )
        own_name = getattr(func, "__name__", type(func).__name__)
        chosen = check_name("name", own_name.strip("<>") if name is None else name)
        signature = (read_batch_api if is_batch_api(func) else read_signature)(func, chosen)
        kind = output_type(signature, data_type, chosen)
        made = UDF(
            func=func,
            name=chosen,
            data_type=kind,
            signature=signature,
            module=module,
            version=None if version is None else check_name("version", version),
            deps=check_sequence("deps", deps),
            input_columns=None if input_columns is None else check_sequence("input_columns", input_columns),
            num_cpus=check_workers(preprocess is not None, preprocess_workers, num_cpus, chosen),
            num_gpus=check_number("num_gpus", num_gpus, above_zero=False),
            memory=check_memory(memory),
            **check_batch_api(
                signature,
                {"batch_size": batch_size, "poll_interval": poll_interval, "visible_after": visible_after}
                | {"timeout": timeout, "limit": limit, "dedup": dedup},
                chosen,
            ),
            checkpoint_size=check_rows("checkpoint_size", checkpoint_size),
            min_checkpoint_size=check_rows("min_checkpoint_size", min_checkpoint_size),
            max_checkpoint_size=check_rows("max_checkpoint_size", max_checkpoint_size),
            on_error=check_policy(on_error),
            timeout=check_number("timeout", timeout, above_zero=True),
            setup_timeout=check_setup_timeout(signature, setup_timeout, chosen),
            **check_batches(signature, batch_by, batch_limit, out_of_memory, chosen),
            cost=check_number("cost", cost, above_zero=False),
            max_in_flight=check_calls(signature.is_async, max_in_flight, chosen),
            deterministic=check_flag("deterministic", deterministic),
            dedup=check_flag("dedup", deterministic and limit is not None if dedup is None else dedup),
            limit=check_limit(limit),
            expect=check_expectations(expect, kind),
            preprocess=None if preprocess is None else _read_stage(preprocess, func, chosen, module),
            preprocess_workers=preprocess_workers,
            requirements=check_requirements(requirements),
        )
        if made.preprocess is not None:
            _check_stage(made, made.preprocess)
        if dedup and not deterministic:
            raise InvalidInput(
                f"UDF {chosen!r} has dedup=True, and is not said to be deterministic. Give deterministic=True too, "
                "if a row's value depends on nothing but the row's inputs and the code."
            )
        check_bounds(made.min_checkpoint_size, made.checkpoint_size, made.max_checkpoint_size)
        if made.input_columns is not None and not made.input_stage.signature.takes_batches:
            _check_count(made.input_stage.signature, made.input_columns, made.input_stage.name)
        return made

    return make if func is None else make(func)


_OF_A_STAGE = {
    *("func", "name", "data_type", "signature", "module", "version", "deps", "input_columns", "deterministic"),
    "max_in_flight",
}


def _read_stage(given: Any, func: Any, name: str, module: str) -> UDF:
    """Make the stage of a UDF from a function, class or object, from another UDF, or from a method's name."""
    owner = kind = None
    if isinstance(given, str):
        found = getattr_static(func, given, None)
        is_method = isinstance(func, type) and not isinstance(found, (staticmethod, classmethod))
        owner = func if is_method else None
        given = found if isinstance(found, UDF) else getattr(func, given, given)
    if isinstance(given, UDF):
        of_call = [f.name for f in fields(UDF) if f.name not in _OF_A_STAGE and getattr(given, f.name) != f.default]
        if of_call:
            raise InvalidInput(
                f"UDF {name!r} has preprocess={given.name}, which has {', '.join(of_call)} of its own. Leave them out "
                "there: error policy, timeout and resources are those of the UDF, and cover its stage."
            )
        if owner is None:
            return replace(given, name=f"{name}.{given.name}")
        given, kind = given.func, given.data_type
    if not callable(given) or isinstance(given, str):
        raise InvalidInput(
            f"UDF {name!r} has preprocess={given!r}. Give a function of the input columns, a function that "
            "@udf(data_type=...) decorates, or the name of a method of the UDF's class."
        )
    own = f"{name}.{getattr(given, '__name__', type(given).__name__).strip('<>')}"
    signature = read_signature(given if owner is None else partial(given, None), own)
    calls = check_calls(signature.is_async, None, own)
    return UDF(given, own, output_type(signature, kind, own), signature, module, max_in_flight=calls, method_of=owner)


def _check_stage(made: UDF, stage: UDF) -> None:
    """Reject a stage whose value the function cannot take, or that cannot run ahead of its calls."""
    if made.is_batch_api or stage.is_batch_api:
        what = "is a batch API" if made.is_batch_api else f"has preprocess={stage.name}, which is a batch API"
        raise InvalidInput(
            f"UDF {made.name!r} {what}. A function preprocesses, for a function that is called row by row or batch by "
            "batch."
        )
    if stage.is_async and made.preprocess_workers is not None:
        raise InvalidInput(
            f"UDF {made.name!r} has preprocess_workers={made.preprocess_workers}, and preprocess={stage.name} is "
            "async. Its calls run side by side in one process, max_in_flight at a time: leave preprocess_workers out."
        )
    takes = made.signature
    if len(takes.required) > 1 or not takes.parameters:
        raise InvalidInput(
            f"UDF {made.name!r} takes {list(takes.required)!r}, and has preprocess={stage.name}, whose value is its "
            "only input. Give it one parameter; a struct can hold several values."
        )
    is_struct = pa.types.is_struct(stage.data_type)
    if made.form == "record_batch" and not is_struct:
        raise InvalidInput(
            f"UDF {made.name!r} takes a pa.RecordBatch, and its preprocess={stage.name} gives {stage.data_type}. "
            "Return a struct, whose fields are the columns, or take a pa.Array."
        )
    if made.form != "record_batch" and accepts(takes.annotation_at(0), stage.data_type) is False:
        raise InvalidInput(
            f"Type mismatch for UDF {made.name!r}: its preprocess={stage.name} gives {stage.data_type}, and its "
            f"parameter {takes.parameters[0]!r} is annotated otherwise. Make them agree."
        )
    made._check_weight([field.name for field in stage.data_type] if is_struct else takes.parameters[:1])
    apart = {name: getattr(made, name) for name in ("preprocess_workers", "timeout", "setup_timeout")}
    chosen = [f"{name}={value!r}" for name, value in apart.items() if value is not None]
    chosen += ["on_error"] * (made.on_error != "fail") + ["async def"] * (made.is_async or stage.is_async)
    if stage.method_of is not None and chosen:
        raise InvalidInput(
            f"UDF {made.name!r} has preprocess={stage.name}, a method of its instance, and {', '.join(chosen)}, with "
            "which they do not share a process or thread: each would load the model. Make it a @staticmethod, or a "
            "function or class of its own."
        )


def find_in_module(found: Any, name: str) -> Any:
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _instance(cls: type, loop: asyncio.AbstractEventLoop | None = None) -> Any:
    """Return this process's instance of a class, which is made once."""
    return _instances.once((cls, loop), cls)


def release_instances(top: str) -> None:
    """Drop this process's instances of classes of a top-level package, whose code is imported again."""
    for key in [key for key in list(_instances) if key[0].__module__.partition(".")[0] == top]:
        _instances.pop(key, None)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


def _collect(function: Callable[..., Iterable[Any]], *arguments: Any) -> list[Any]:
    return list(function(*arguments))


def _check_count(signature: Signature, columns: Sequence[str], name: str) -> None:
    least, most = len(signature.required), len(signature.parameters)
    if len(columns) < max(least, 1) or (len(columns) > most and not signature.takes_any_number):
        raise InvalidInput(
            f"UDF {name!r} takes the parameters {list(signature.parameters)!r}, and {len(columns)} input columns are "
            f"mapped to them: {list(columns)!r}. Name one column for each parameter that has no default value."
        )
