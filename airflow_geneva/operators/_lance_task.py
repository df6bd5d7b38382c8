"""Shared by the operators: templated fields, the configuration, the database, a stored plan, and stopping a task."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.providers.common.compat.sdk import AirflowFailException, AirflowTaskTimeout, conf
from airflow.sdk import BaseOperator

from airflow_geneva.engine import api
from airflow_geneva.engine.choices import Choice, OnPartial
from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.outages import with_patience
from airflow_geneva.errors import GenevaError, InvalidInput, TableRemade, UdfError
from airflow_geneva.get_provider_info import get_provider_info
from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.operators._airflow_internals import default_retry_policy

if TYPE_CHECKING:
    from airflow_geneva.database import Database
    from airflow_geneva.engine.udf import UDF

_NOTHING = ("", "None")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")
ERROR = "error"
"""XCom key of the error of a task without a job."""
_PLAN = re.compile(r"(?P<table>.+)/_checkpoints/jobs/(?P<job>[^/]+)/[^/]+")
_TEMPLATE = re.compile(r"\{\{|\{%")
_N = TypeVar("_N", int, float)


def is_template(value: Any) -> bool:
    """Whether a value is known only at run time: a Jinja template, or the output of a task or a param."""
    return value is not None and (not isinstance(value, str) or bool(_TEMPLATE.search(value)))


def optional_text(value: Any) -> str | None:
    """Return text, or None if it is empty."""
    return None if value is None or str(value).strip() in _NOTHING else str(value).strip()


_Word = TypeVar("_Word", bound=Choice)


def check_word(words: type[_Word], name: str, value: Any) -> _Word | None:
    """Return the choice that a word names; None for empty text, and for what is known only at run time.

    Operators call it while a DAG is parsed.

    Raises:
        InvalidInput: it names none.
    """
    return None if is_template(value) or optional_text(value) is None else words.check(name, optional_text(value))


def is_last_try(ti: Any) -> bool:
    """Whether this is the last attempt of a task; without a task instance, the value that the caller gives."""
    return ti is not None and int(ti.try_number) > int(getattr(ti, "max_tries", ti.try_number))


def required_text(name: str, value: Any) -> str:
    """Return text that is not empty, or raise an AirflowFailException."""
    text = optional_text(value)
    if text is None:
        raise AirflowFailException(f"{name}={value!r} is empty. Give the {name}, or check what its template renders.")
    return text


def optional_int(name: str, value: Any) -> int | None:
    """Return a whole number, or None for empty text; raise an AirflowFailException for anything else."""
    return _optional_number(int, "a whole number", name, value)


def optional_float(name: str, value: Any) -> float | None:
    """Return a number, or None for empty text; raise an AirflowFailException for anything else."""
    return _optional_number(float, "a number", name, value)


def optional_rows(name: str, value: Any) -> int | float | None:
    """Parse a number of rows; text with a decimal point is a fraction of all rows, empty text is None."""
    of = optional_float if set(optional_text(value) or "") & set(".e") else optional_int
    return of(name, value)


def _optional_number(kind: Callable[[str], _N], what: str, name: str, value: Any) -> _N | None:
    text = optional_text(value)
    try:
        if isinstance(value, bool):
            raise ValueError(value)
        return None if text is None else kind(text)
    except ValueError:
        raise AirflowFailException(f"{name}={value!r} is not {what}. Give one, or nothing for the default.") from None


def parse_bool(name: str, value: Any) -> bool:
    """Return a boolean, for empty text false; raise an AirflowFailException for anything else."""
    text = (optional_text(value) or "false").lower()
    if text not in _TRUE + _FALSE:
        raise AirflowFailException(f"{name}={value!r} is neither true nor false. Give one of them.")
    return text in _TRUE


def parse_json(name: str, value: Any) -> Any:
    """Return a list or an object, also of JSON text, or None for empty text; other text is an AirflowFailException."""
    text = optional_text(value) if isinstance(value, str) else None
    try:
        return parse(text) if text else None if isinstance(value, str) else value
    except ValueError:
        raise AirflowFailException(
            f"{name}={value!r:.200} is text, and not the JSON of a list or an object. A template that renders one ends "
            "in '| tojson'."
        ) from None


def check_import_path(udf: Any) -> str | None:
    """Refuse the function itself, which another process cannot find; return an import path or a template."""
    if udf is None or isinstance(udf, str) or hasattr(udf, "resolve"):  # the output of another task, or a param
        return udf  # type: ignore[no-any-return]
    path = getattr(udf, "import_path", None)
    hint = f"udf={path!r}" if path else 'udf="my_project.udfs:embed"'
    shown = f"<UDF {udf.name}>" if path else f"{udf!r:.80}"
    raise InvalidInput(f"udf={shown} is not text. Tasks run in other processes: give its import path, {hint}.")


def load_named_udf(path: Any) -> UDF:
    """Import the UDF that a column of an operator's argument names."""
    from airflow_geneva.engine.udf import load_udf

    return load_udf(required_text("udf", check_import_path(path)))


@dataclass(frozen=True)
class Configuration:
    """The options in section `[geneva]`; `get_provider_info` describes each with its default."""

    inline_below_seconds: int
    inline_below_rows: int
    concurrency: int
    version_conflict_max_retries: int
    task_memory_bytes: int
    price_per_slot_hour: float
    on_partial: OnPartial
    udf_modules: tuple[str, ...]
    allowed_places: tuple[str, ...]
    store_patience: int

    def retrying_commits(self) -> AbstractContextManager[None]:
        """Retry commits in a block as often as configured."""
        return api.conflict_retries(self.version_conflict_max_retries)

    @staticmethod
    def read() -> Configuration:
        """Read all options, so that the first task of a run finds a wrong one, not the last.

        Raises:
            AirflowFailException: the value of an option is not valid.
            InvalidInput: an environment variable that overrides an option is not a valid number.
        """
        described = get_provider_info()["config"]["geneva"]["options"]
        names = [option.name for option in fields(Configuration)]
        found = Configuration(**{name: _read(name, described[name]["default"]) for name in names})
        with found.retrying_commits():  # which refuses a wrong environment variable
            return found


def _read(name: str, default: str) -> Any:
    if name in ("udf_modules", "allowed_places"):
        return tuple(str(conf.get("geneva", name, fallback=default)).replace(",", " ").split())
    text = str(conf.get("geneva", name, fallback=default)).strip()
    if name == "on_partial":
        if text in OnPartial.words():
            return OnPartial(text)
        valid = OnPartial.listed()
    elif name == "price_per_slot_hour":
        if (price := _price(text)) is not None:
            return price
        valid = "a number of 0 or more"
    else:
        least = {"concurrency": 1, "task_memory_bytes": api.Sizing.least("task_memory_bytes")}.get(name, 0)
        if text.isdecimal() and int(text) >= least:
            return int(text)
        valid = f"a whole number of {least} or more"
    raise AirflowFailException(
        f"[geneva] {name} is {text!r}, and not {valid}. Correct it in airflow.cfg on the workers, or in their "
        f"environment: AIRFLOW__GENEVA__{name.upper()}."
    )


def _price(text: str) -> float | None:
    try:
        return price if 0 <= (price := float(text)) < float("inf") else None
    except ValueError:
        return None


SHARD_TITLE = "{{ ti.task.shard.get('title', '') if ti.task.shard is mapping else '' }}"
"""Names a mapped task by its shard; Airflow's UI shows this name instead of the map index."""


def with_retry_policy(given: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments with the given retry policy, or the default one."""
    policy = given or default_retry_policy()
    return dict(arguments) if policy is None else {**arguments, "retry_policy": policy}


class LanceOperator(BaseOperator):
    """A task that works on a Lance database in its own process.

    Args:
        lance_conn_id: the Airflow connection of the database.
        database: another URI to use with that connection's storage options.
        retry_policy: Airflow 3.3 and later; None: retry soon after a commit conflict, and never after a wrong request.
    """

    template_fields: Sequence[str] = ("lance_conn_id", "database")

    def __init__(
        self,
        *,
        lance_conn_id: str = "lance_default",
        database: str | None = None,
        retry_policy: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**with_retry_policy(retry_policy, kwargs))
        self.lance_conn_id = lance_conn_id
        self.database = database

    def open_database(self) -> Database:
        return open_patiently(self.lance_conn_id, self.database)

    def on_kill(self) -> None:
        stop_task()


@contextmanager
def cause_first(log: Any) -> Iterator[None]:
    """Log an error of a UDF in full, and raise only its first line: Airflow prints its own frames before an error."""
    try:
        yield
    except UdfError as error:
        log.error("%s", error)
        raise UdfError(str(error).partition("\n")[0], error.row_index) from None


@contextmanager
def push_error_to_xcom(context: Mapping[str, Any]) -> Iterator[None]:
    """Push the error of a failed attempt to XCom, for programs that asked for the run and cannot read its logs."""
    from airflow_geneva.engine.storage.engine_errors import panics_as_errors

    try:
        with panics_as_errors():
            yield
    except (GenevaError, OSError, AirflowFailException) as error:
        if "ti" in context:
            context["ti"].xcom_push(ERROR, mask_secrets(str(error)))
        raise


@contextmanager
def failing_at_once(*kinds: type[GenevaError]) -> Iterator[None]:
    """Fail the task without a retry on an error of these kinds."""
    try:
        yield
    except kinds as error:
        raise AirflowFailException(str(error)) from error


def answered_by(answer: Mapping[str, Any]) -> str:
    """Return the user who answered a required action, from the event of Airflow's human-in-the-loop operator."""
    user = answer.get("responded_by_user") or {}
    return str(user.get("name") or user.get("id") or "the default answer")


def open_database(lance_conn_id: str, database: str | None) -> Database:
    """Open the database that templated fields name."""
    return LanceHook(required_text("lance_conn_id", lance_conn_id)).get_database(optional_text(database))


def open_patiently(lance_conn_id: str, database: str | None) -> Database:
    """Open a database for a task whose reads and writes wait for `[geneva] store_patience` seconds in an outage."""
    found, seconds = open_database(lance_conn_id, database), Configuration.read().store_patience
    return replace(found, options=with_patience(found.uri, found.options, seconds))


def stop_task() -> None:
    """End the task at its current statement.

    After Airflow's signal to stop, a task may run for seconds, in which it could still commit. All writes are atomic,
    so it is safe to stop at any statement. A task that timed out is already ending.
    """
    if not isinstance(sys.exc_info()[1], AirflowTaskTimeout):
        raise SystemExit("Airflow stopped the task. Nothing is half-written; the next try continues from here.")


def load_job(database: Database, reference: Mapping[str, Any]) -> api.PlannedJob:
    """Read the plan that an XCom names, without its fragments, and check its fingerprint.

    A user who can edit XComs must not be able to choose a plan, because its code would run. So the plan must be beside
    a table of the task's own database, and the job's record, which the plan task wrote, must name its fingerprint too.

    Raises:
        InvalidInput: the plan was removed or changed, or is not the one that the plan task wrote.
        TableRemade: a catalog has moved the table since.
    """
    uri, fingerprint = str(reference["plan_uri"]), str(reference["fingerprint"])
    found = _PLAN.fullmatch(uri)
    name = str(reference["table"])
    location = database.location(name) if found else None
    if found and location and database.in_catalog and location.uri != found["table"]:
        raise TableRemade(
            f"Table {name!r} was planned in {found['table']}, and the catalog {database.uri} says that it is in "
            f"{location.uri} now: it was moved or made again. Clear the plan task with its downstream tasks."
        )
    if found is None or location is None or location.uri != found["table"]:
        raise InvalidInput(
            f"The XCom of the plan task names a plan in {uri!r:.300}, which is none of a table in this task's "
            f"database, {database.uri}. Give all tasks the same connection and database, and clear the plan task."
        )
    return api.open_job(
        location, found["job"], fingerprint, resumes="shard" in reference
    )  # with a shard: it was cleared


def check_shard(shard: Any) -> Mapping[str, Any]:
    """Refuse a value that is not the plan task's output for one shard, for example after a clear of the plan task."""
    if not isinstance(shard, Mapping) or not {"plan_uri", "fingerprint", "shard"} <= shard.keys():
        raise AirflowFailException(
            f"shard is {shard!r:.200}, which no plan task returned. Give one entry of the plan's output: "
            "ApplyOperator.partial(...).expand(shard=plan.output)."
        )
    return shard
