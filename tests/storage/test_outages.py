"""An object store that is away for a while: requests wait for it unless asked to end, and no commit is made twice."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_geneva import connect
from airflow_geneva.engine.storage import outages
from airflow_geneva.engine.storage.files import Storage, in_threads
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.outages import PATIENCE, pylance_options, wait_out, with_patience
from airflow_geneva.errors import GenevaError, StorageError
from tests.support.counting import Trace, triple, tripled
from tests.support.invariants import assert_exact, assert_right
from tests.support.object_store import Bucket, numbers
from tests.support.outage import Proxy, at_log

LOGGER, WAITS, IS_BACK = "airflow_geneva.storage", "does not answer", "answers again"
AWAY = OSError("Generic S3 error: Error performing PUT http://store/b/a - HTTP error: error sending request")


class Asked(BaseException):
    """Asks a task to end, as Airflow does at its `execution_timeout`."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "_SLOW_SECONDS", 0.1)
    monkeypatch.setattr(outages, "_FIRST_PAUSE", 0.05)


@pytest.fixture
def through(proxy: Proxy, options: dict[str, str]) -> dict[str, str]:
    """Storage options of a store that can be away; pylance tries only once before our own wait."""
    return {**options, "aws_endpoint": proxy.endpoint, "lance_aimd_max_retries": "0"}


@pytest.fixture
def folder(bucket: Bucket, through: dict[str, str]) -> Storage:
    place = f"s3://{bucket.name}/db/docs.lance/_checkpoints"
    found = Storage(place, with_patience(place, tuple(sorted(through.items())), 60))
    found.write_json("a.json", {"k": 1})
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "ask",
    [
        lambda folder: folder.write_json("a.json", {"k": 2}),
        lambda folder: folder.read_json("a.json"),
        lambda folder: folder.read_part("a.json", 0, 1),
        lambda folder: folder.list_folder(),
        lambda folder: folder.delete("a.json"),
    ],
)
def test_a_request_waits_until_the_store_is_back_and_says_so_once(
    folder: Storage, proxy: Proxy, ask: Callable[[Storage], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def back() -> None:
        monkeypatch.setattr(outages, "_SLOW_SECONDS", 60.0)
        proxy.up()

    # A thread of another test may still wait for its own bucket.
    bucket = "/".join(folder.root.split("/")[:3])
    proxy.down()
    with at_log(LOGGER, f"{bucket} {WAITS}", back) as lines:
        ask(folder)
        folder.list_folder()
    own = [line for line in lines if line.startswith(f"{bucket} ")]
    assert [text for line in own for text in (WAITS, IS_BACK) if text in line] == [WAITS, IS_BACK]
    assert "for at most 60 seconds (in Airflow: [geneva] store_patience)" in own[0]


@pytest.mark.slow
def test_a_table_is_opened_and_read_when_the_store_is_back(
    bucket: Bucket, proxy: Proxy, through: dict[str, str]
) -> None:
    db = connect(f"s3://{bucket.name}/db", storage_options=through)
    location = db.create_table("docs", numbers(*range(20)), max_rows_per_file=10).location.patient(60)
    for read in (location.open, location.open().to_table):
        proxy.down()
        with at_log(LOGGER, WAITS, proxy.up) as lines:
            wait_out(location.uri, location.options, read)
        assert WAITS in lines[0]
    assert proxy.refusing.is_set() is False


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_when_the_store_is_back(
    bucket: Bucket, proxy: Proxy, through: dict[str, str], trace: Trace
) -> None:
    table = connect(f"s3://{bucket.name}/db", through).create_table("docs", numbers(*range(60)), max_rows_per_file=20)
    table.add_columns({"y": triple})
    for line in (rb"PUT .*/jobs/.*/status-", rb"PUT .*/data/", rb"GET .*/data/", rb"PUT .*/_versions/"):
        proxy.at_request(line, lambda: proxy.down_for(0.6))
    result = table.backfill("y", runner="inline", checkpoint_size=8)
    assert proxy.watched == 0
    assert (result.state, result.rows_computed) == ("DONE", 60)
    assert_exact(trace, range(60))
    assert_right(table, "y", tripled)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["column", "view"])
@pytest.mark.parametrize("retries", [{}, {"client_max_retries": "0"}])
def test_a_commit_whose_answer_was_lost_is_not_made_twice(
    bucket: Bucket, proxy: Proxy, through: dict[str, str], kind: str, retries: dict[str, str]
) -> None:
    """With retries pylance finds its own commit; without, the commit is looked for in the newest version."""
    db = connect(f"s3://{bucket.name}/db", {**through, **retries})
    table = db.create_table("docs", numbers(*range(20)), max_rows_per_file=10)
    if kind == "column":
        table.add_columns({"y": triple})
        target, run = table, lambda: table.backfill("y", runner="inline")
    else:
        target = table.query().select({"y": triple}).create_materialized_view(db, "v")
        run = lambda: target.refresh(runner="inline")  # noqa: E731
    before = target.version
    proxy.lose_answer(rb"PUT .*/_versions/")
    result = run()
    assert proxy.has_lost
    assert (result.state, result.rows_left) == ("DONE", 0)
    found = target.lance
    made = [found.read_transaction(version) for version in range(before + 1, found.version + 1)]
    kinds = [type(transaction.operation).__name__ for transaction in made]
    assert kinds.count("DataReplacement" if kind == "column" else "Overwrite") == 1
    assert sorted(found.to_table(columns=["y"])["y"].to_pylist()) == [tripled(x) for x in range(20)]


class Failing:
    """A request that fails with each error in turn, and then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "found"


def patient(seconds: int) -> tuple[tuple[str, str], ...]:
    return with_patience("s3://away/db", (), seconds)


def test_the_patience_is_that_of_an_outage_and_not_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 1e6 + sum(waited), sleep=waited.append)
    monkeypatch.setattr(outages, "time", clock)
    for _ in range(3):
        with pytest.raises(OSError, match="error sending request"):
            wait_out("s3://away/db", patient(1), Failing(*[AWAY] * 1000))
        assert sum(waited) == pytest.approx(1)
    assert wait_out("s3://away/db", patient(1), Failing()) == "found"
    assert wait_out("s3://away/db", patient(1), Failing(AWAY)) == "found"


@pytest.mark.parametrize(
    "refused",
    [
        OSError("Generic S3 error: ... - Server returned non-2xx status code: 403 Forbidden: InvalidAccessKeyId"),
        ValueError("Generic S3 error: ... - Server returned non-2xx status code: 404 Not Found: NoSuchBucket"),
        ValueError("LanceError(IO): Failed to get AWS credentials: ... HTTP error: error sending request"),
        ValueError("Generic GCS error: Error performing token request: ... HTTP error: error sending request"),
        RuntimeError("Generic S3 error: HTTP error: builder error"),
        FileNotFoundError("a.json"),
    ],
)
def test_what_a_later_request_would_not_get_either_fails_at_once(refused: Exception) -> None:
    with at_log(LOGGER, "", lambda: None) as lines, pytest.raises(type(refused)):
        wait_out("s3://away/db", patient(60), Failing(refused, AWAY))
    assert lines == []


@pytest.mark.slow
def test_a_bucket_that_does_not_exist_fails_at_once(options: dict[str, str]) -> None:
    place = TableLocation("s3://no-such-bucket/db/docs.lance", "docs", tuple(options.items())).patient()
    for ask in (place.open, lambda: place.checkpoints.write_json("a", {}), place.checkpoints.list_folder):
        began = time.monotonic()
        # SeaweedFS answers 403 to a write there, where Amazon's S3 says NoSuchBucket.
        with pytest.raises(GenevaError, match=r"NoSuchBucket|403 Forbidden"):
            ask()
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("options", [(), patient(0)])
def test_without_patience_nothing_waits(options: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(OSError, match="error sending request"):
        wait_out("s3://away/db", options, Failing(AWAY))
    assert pylance_options(options) == (dict(options) or None)


def test_a_local_disk_has_no_patience() -> None:
    assert with_patience("/tmp/db", ()) == ()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"client_max_retries": "1000000", "client_retry_timeout": "60"}),
        ({"client_max_retries": "2"}, {"client_max_retries": "2", "client_retry_timeout": "60"}),
        ({"Client_Retry_Timeout": "7"}, {"client_max_retries": "1000000", "Client_Retry_Timeout": "7"}),
    ],
)
def test_pylances_own_retries_last_as_long_where_the_user_set_none(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    options = with_patience("s3://b/db", tuple(given.items()))
    assert with_patience("s3://b/db", options, 5) == options
    assert pylance_options(options) == {PATIENCE: "300", **expected}


def test_pylances_retries_in_the_environment_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OBJECT_STORE_CLIENT_MAX_RETRIES", "2")
    assert pylance_options(patient(300)) == {PATIENCE: "300", "client_retry_timeout": "60"}


def ask_to_end(seconds: float) -> None:
    def ask(*_: Any) -> None:
        raise Asked

    signal.signal(signal.SIGALRM, ask)
    signal.setitimer(signal.ITIMER_REAL, seconds)


@contextmanager
def cleaning_up(folder: Storage) -> Iterator[None]:
    try:
        yield
    finally:
        with pytest.raises(StorageError):
            folder.write_json("end.json", {})


@pytest.mark.slow
@pytest.mark.parametrize("where", ["document", "table", "threads"])
def test_a_task_that_is_asked_to_end_ends_and_its_clean_up_does_not_wait(
    bucket: Bucket, folder: Storage, proxy: Proxy, through: dict[str, str], where: str
) -> None:
    place = f"s3://{bucket.name}/db"
    location = connect(place, through).create_table("docs", numbers(1)).location.patient(60)

    def wait() -> None:
        if where == "threads":
            in_threads(folder.read_json, ["a.json"] * 4, 2)
        elif where == "table":
            location.open()
        else:
            folder.read_json("a.json")

    proxy.down()
    began = time.monotonic()
    ask_to_end(1.0)
    with pytest.raises(Asked), cleaning_up(folder):
        wait()
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_job_fails_when_the_patience_ends_and_the_next_goes_on(
    bucket: Bucket, proxy: Proxy, through: dict[str, str], trace: Trace
) -> None:
    place = f"s3://{bucket.name}/db"
    table = connect(place, {**through, PATIENCE: "1", "client_max_retries": "0"}).create_table(
        "docs", numbers(*range(40)), max_rows_per_file=20
    )
    table.add_columns({"y": triple})
    proxy.at_request(rb"PUT .*/_versions/", proxy.down)
    with pytest.raises(GenevaError, match="error sending request"):
        table.backfill("y", runner="inline")
    proxy.up()
    assert table.backfill("y", runner="inline").state == "DONE"
    assert_exact(trace, range(40))
