"""Places and names: one form for every spelling, and no way out of a folder."""

from __future__ import annotations

import os
import pickle
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from lance.file import LanceFileSession

from airflow_geneva import connect
from airflow_geneva.database import Database
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.uri import check_name, normalize_uri
from airflow_geneva.errors import GenevaError, InvalidInput, StorageError, UdfError


@pytest.mark.parametrize(
    "spelling", ["{0}/db", "{0}/db/", "{0}/./db", "{0}/other/../db", "file://{0}/db", "{0}/link", "db"]
)
def test_every_spelling_of_a_place_is_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "db")
    monkeypatch.chdir(tmp_path)
    assert normalize_uri(spelling.format(tmp_path)) == os.path.realpath(tmp_path / "db")


def test_a_table_that_is_a_link_is_no_table_of_the_database(tmp_path: Path) -> None:
    connect(tmp_path / "other").create_table("pay", pa.table({"x": [1]}))
    db = connect(tmp_path / "db")
    db.create_table("docs", pa.table({"x": [1]}))
    (tmp_path / "db" / "pay.lance").symlink_to(tmp_path / "other" / "pay.lance")
    assert db.table_names() == ["docs"]
    with pytest.raises(InvalidInput, match="There is no table 'pay'"):
        db.open_table("pay")
    with pytest.raises(InvalidInput, match="symbolic link"):
        db.location("pay").open()
    assert not db.location("pay").exists()


ENDPOINT = "http://planted:se:cr@t@127.0.0.1:9"


@pytest.mark.parametrize("call", [lambda db: db.table_names(), lambda db: db.open_table("docs"), lambda db: db.jobs()])
def test_an_endpoint_that_names_its_credentials_is_not_repeated(call: Callable[[Database], Any]) -> None:
    """pylance repeats it in every error."""
    options = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "aws_region": "us-east-1"}
    quick = {"aws_endpoint": ENDPOINT, "allow_http": "true", "client_max_retries": "0", "client_retry_timeout": "1"}
    with pytest.raises(GenevaError, match=re.escape("http://***@127.0.0.1:9/lake")) as told:
        call(connect("s3://lake/db", {**options, **quick}))
    assert "planted" not in str(told.value)
    assert "planted" not in "".join(traceback.format_exception(told.value)), "a log prints the cause, too"


@pytest.mark.parametrize("ending", ["result", "failed"])
def test_what_a_job_keeps_of_its_failure_names_no_credentials(tmp_path: Path, ending: str) -> None:
    folder = JobFolder.of(Storage.at(str(tmp_path)), "20260101T000000-a")
    if ending == "result":
        folder.write_record({})
        folder.write_result("FAILED", {}, f"cannot reach {ENDPOINT}/lake")
    else:
        with pytest.raises(OSError, match="planted"), folder.recording_failure("f" * 64, 0):
            raise OSError(f"cannot reach {ENDPOINT}/lake")
    [written] = (tmp_path / "jobs").rglob("*.json")
    assert "cannot reach http://***@127.0.0.1:9/lake" in written.read_text()
    assert "planted" not in written.read_text()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://user:pass@proxy:3128/x?a=1 failed", "GET https://***@proxy:3128/x?a=1 failed"),
        ("https://token@host/x", "https://***@host/x"),
        ("s3://key:secret@bucket/db, s3://other/db", "s3://***@bucket/db, s3://other/db"),
        ("abfss://container@account/db", "abfss://container@account/db"),
        ("GET https://h/c?sv=1&sig=a%2Fb%3D&se=2", "GET https://h/c?sv=1&sig=***&se=2"),
        (
            "https://h/o?X-Amz-Signature=abc&X-Amz-Security-Token=d)",
            "https://h/o?X-Amz-Signature=***&X-Amz-Security-Token=***)",
        ),
        ("https://h/o?AWSAccessKeyId=k&Signature=abc", "https://h/o?AWSAccessKeyId=k&Signature=***"),
        ("AccountName=a;AccountKey=b+c==;EndpointSuffix=d", "AccountName=a;AccountKey=***;EndpointSuffix=d"),
        ("https://h/o?access_token=a and ?token=b", "https://h/o?access_token=*** and ?token=***"),
        (
            "password=a token=b api_key='c' aws_secret_access_key=d/e",
            "password=*** token=*** api_key='***' aws_secret_access_key=***",
        ),
        ("{'password': 'a', 'user': 'b'} Bearer abcdefgh.i", "{'password': '***', 'user': 'b'} Bearer ***"),
        ("token = next(words); max_tokens=5, the token: x", "token = next(words); max_tokens=5, the token: x"),
        ("write to me@example.com: 1 & sig = 2", "write to me@example.com: 1 & sig = 2"),
    ],
)
def test_urls_are_shown_without_users_passwords_and_signatures(text: str, shown: str) -> None:
    assert mask_secrets(text) == shown
    assert str(StorageError(text)) == str(InvalidInput(text)) == str(UdfError(text)) == shown


@pytest.mark.parametrize("part", ["AC-", "a_", "a.", "/a", "://", "x-a-", "'", "a:"])
def test_a_long_text_is_masked_like_a_short_one(part: str) -> None:
    """An exception may repeat a whole document; no expression looks at all that follows from each of its places."""
    text = part * 30_000
    assert str(UdfError(f"{text} my_password=x s3://a:b@c {text}")) == f"{text} my_password=*** s3://***@c {text}"


def test_the_key_of_a_model_service_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "my-Key+1234")
    assert str(UdfError("Error 401: my-Key+1234 is no key here")) == "Error 401: *** is no key here"
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    assert mask_secrets("none of them") == "none of them"


@pytest.mark.parametrize("uri", ["s3://bucket/db", "s3://bucket/db/", "gs://bucket/db", "abfss://c@account/db"])
def test_an_object_store_keeps_its_scheme(uri: str) -> None:
    assert normalize_uri(uri) == uri.rstrip("/")


@pytest.mark.parametrize(
    "uri",
    [
        "s3://planted:secret@bucket/db",
        "s3://planted@bucket/db",
        "abfss://planted:secret@account/db",
        "az://container/db?sig=planted",
        "s3://[planted/db",
        "s3://bucket/db#token=planted",
        "file://user:planted@host/db",
        "file://planted@host/db",
        "file:///db?token=planted",
        "file:///db#token=planted",
        "FILE://user:planted@host/db",
        "file://[planted/db",
    ],
)
def test_a_place_that_names_its_credentials_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        normalize_uri(uri)
    assert "planted" not in str(refused.value)


def test_a_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="names the machine 'host'"):
        normalize_uri("file://host/db")
    assert normalize_uri(f"file://localhost{tmp_path}") == normalize_uri(f"file:{tmp_path}") == str(tmp_path.resolve())


def test_a_table_is_no_database_and_says_how_it_is_opened(tmp_path: Path) -> None:
    connect(tmp_path).create_table("docs", pa.table({"x": [1]}))
    with pytest.raises(InvalidInput, match=r"is a table and not a database.*\.open_table\('docs'\)"):
        connect(tmp_path / "docs.lance")


def test_a_folder_that_no_table_can_be_called_is_no_table(tmp_path: Path) -> None:
    for folder in ("docs.lance", "my docs.lance", "no_table"):
        (tmp_path / folder / "_versions").mkdir(parents=True)
    assert connect(tmp_path).table_names() == ["docs"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 5, "key": "planted"}, r"those of \['port'\] are not"),
        ("key=planted", "given by name, .* not as a str"),
    ],
)
def test_options_that_are_not_text_by_name_are_refused_and_not_repeated(options: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        connect("s3://bucket/db", options)
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schema": "x"}, "schema='x' is no Arrow schema"),
        ({"data": {"x": [1]}, "max_rows_per_file": 0}, "max_rows_per_file=0 is not valid"),
    ],
)
def test_a_table_is_not_created_from_what_is_no_schema_or_size(tmp_path: Path, given: Any, message: str) -> None:
    db = connect(tmp_path)
    with pytest.raises(InvalidInput, match=message):
        db.create_table("docs", **given)
    assert db.table_names() == []
    with pytest.raises(InvalidInput, match="newest=-1 is not valid"):
        db.jobs(-1)


@pytest.mark.parametrize("nothing", ["", None, 3])
def test_an_empty_place_is_refused(nothing: Any) -> None:
    with pytest.raises(InvalidInput, match=r"is neither a path nor a URI\. Give one such as s3://bucket/db"):
        normalize_uri(nothing)


def test_a_scheme_with_one_slash_is_no_folder_of_this_machine() -> None:
    with pytest.raises(InvalidInput, match="needs two slashes: s3://bucket/db"):
        normalize_uri("s3:/key:planted@bucket/db")


@pytest.mark.parametrize("name", ["docs", "my-docs_2.v1", "_x", "9"])
def test_ordinary_names_are_names(name: str) -> None:
    assert check_name(name, "table") == name


@pytest.mark.parametrize(
    "name", ["", "..", "../up", "a/b", "a\\b", ".hidden", "a..b", "a b", "docs\n", "a\0b", "ü", "x" * 201, "/etc", None]
)
def test_a_name_that_could_leave_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    db = connect(tmp_path / "db")
    with pytest.raises(InvalidInput, match="not a table name"):
        db.create_table(name, pa.table({"x": [1]}))
    with pytest.raises(InvalidInput, match="not a table name"):
        db.open_table(name)
    assert not (tmp_path / "db").exists()


@pytest.mark.parametrize("job_id", ["", "..", "a/b", "../up", ".hidden", "job\n", "x" * 200])
def test_a_job_id_that_could_leave_its_folder_is_refused(tmp_path: Path, job_id: str) -> None:
    with pytest.raises(InvalidInput, match="not a job id"):
        JobFolder.of(Storage.at(str(tmp_path)), job_id)


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/../../b", "a\\b"])
def test_a_document_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    folder = Storage.at(str(tmp_path / "inside"))
    for action in (
        lambda: folder.write_bytes(name, b"x"),
        lambda: folder.read_bytes(name),
        lambda: folder.delete(name),
    ):
        with pytest.raises(InvalidInput, match="must stay inside its folder"):
            action()


def test_a_document_is_written_whole_and_read_back(tmp_path: Path) -> None:
    folder = Storage.at(str(tmp_path / "new" / "folder"))
    folder.write_json("a/b.json", {"k": [1, None]})
    assert folder.read_json("a/b.json") == {"k": [1, None]}
    assert folder.exists("a/b.json")
    assert folder.list_files() == ["a/b.json"]
    assert folder.list_files("a") == ["a/b.json"]
    assert folder.list_folder() == (["a"], [])
    assert folder.list_folder("a") == ([], ["b.json"])
    folder.delete("a/b.json")
    folder.delete("a/b.json")
    assert not folder.exists("a/b.json")
    with pytest.raises(FileNotFoundError):
        folder.read_bytes("a/b.json")


def test_a_document_that_is_being_read_is_not_written_over(tmp_path: Path) -> None:
    storage = Storage.at(str(tmp_path))
    storage.write_json("document.json", ["before"])
    with (tmp_path / "document.json").open("rb") as reading:
        storage.write_json("document.json", ["after"])
        assert reading.read() == b'["before"]'
    assert storage.read_json("document.json") == ["after"]


def test_a_place_that_is_not_there_lists_nothing(tmp_path: Path) -> None:
    folder = Storage.at(str(tmp_path / "nowhere"))
    assert folder.list_files() == []
    assert folder.list_folder() == ([], [])


def test_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match=r"Cannot write .*file/x.*Check that the location exists and is writable"):
        Storage.at(str(tmp_path / "file")).write_bytes("x", b"1")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_credentials_are_never_shown(tmp_path: Path) -> None:
    options = {"aws_secret_access_key": "s3cr3t-value"}
    db = connect(tmp_path, storage_options=options)
    shown = [
        repr(db),
        repr(db.location("t")),
        repr(Storage.at(str(tmp_path), options)),
        str(db.location("t").checkpoints),
    ]
    assert not any("s3cr3t" in text for text in shown)


def test_a_pickle_holds_the_credentials_that_executors_need(tmp_path: Path) -> None:
    db = connect(tmp_path, storage_options={"aws_secret_access_key": "s3cr3t-value"})
    table = db.create_table("docs", pa.table({"x": [1]}))
    view = table.query().create_materialized_view(name="v")
    for value in (db, table, view, table.query(), table.location):
        again = pickle.loads(pickle.dumps(value))
        assert again == value
        assert b"s3cr3t-value" in pickle.dumps(again), type(value)


@pytest.mark.parametrize("listed", [lambda folder: folder.list_files(), lambda folder: folder.list_folder("jobs")])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: Callable[[Storage], Any]
) -> None:
    folder = Storage.at(str(tmp_path))
    folder.write_json("jobs/a.json", {})
    found = listed(folder)
    assert "a.json" in str(found)
    (tmp_path / "jobs").rename(tmp_path / "gone")
    assert "jobs" not in str(listed(folder))
    (tmp_path / "gone").rename(tmp_path / "jobs")
    scan = os.scandir

    def out_of_reach(path: str) -> Any:
        if str(path).endswith("jobs"):
            raise OSError(24, "Too many open files", path)
        return scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", out_of_reach)
        with pytest.raises(StorageError, match=r"Cannot list .*Too many open files"):
            listed(folder)
    assert listed(folder) == found


def test_a_document_can_be_read_by_those_who_can_read_the_table(tmp_path: Path) -> None:
    former = os.umask(0o022)
    try:
        Storage.at(str(tmp_path)).write_json("plan.json", {})
    finally:
        os.umask(former)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o644


def test_a_lance_file_is_opened_again_if_a_cleanup_removes_its_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, opened, calls = Storage(str(tmp_path)), LanceFileSession.open_writer, list[str]()

    def removing(session: LanceFileSession, path: str, **more: Any) -> Any:
        calls.append(path)
        if len(calls) == 1:
            raise OSError(f"LanceError(IO): No such file or directory (os error 2) at path {path}")
        return opened(session, path, **more)

    monkeypatch.setattr(LanceFileSession, "open_writer", removing)
    storage.open_writer("folder/file.lance", pa.schema([("x", pa.int64())])).close()
    assert calls == ["folder/file.lance"] * 2
    assert storage.exists("folder/file.lance")
    monkeypatch.setattr(LanceFileSession, "open_writer", lambda *_, **__: Path("/nowhere/at/all").read_text())
    with pytest.raises(OSError, match="No such file"):
        storage.open_writer("folder/file.lance", pa.schema([("x", pa.int64())]))
