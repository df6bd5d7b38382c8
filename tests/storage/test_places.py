"""Places: which URIs may be opened. A table of cases; the next person extends it by a line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from airflow_geneva import connect, connect_namespace
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.places import PLACES, Places, allow_places
from airflow_geneva.engine.storage.secrets import secret_values
from airflow_geneva.errors import InvalidInput

STORE = "s3://bucket/db"

IN_STORE = (
    "s3://bucket/db",
    "s3://bucket/db/",
    "s3://bucket/db/docs.lance",
    "S3://bucket/db/docs.lance",
    "s3a://bucket/db/part-0.parquet",
    "s3n://bucket/db/part-0.parquet",
    "s3://bucket/db/photos/../docs.lance",
    "s3://bucket/db/./docs.lance",
    "s3://bucket/db/my%20photos/1.jpg",
    "s3://bucket/db/my photos/1.jpg",
    "s3://bucket/db/100%/1.jpg",
    "s3://bucket/db/..secret",
)
OUT_OF_STORE = (
    "s3://bucket",
    "s3://bucket/",
    "s3://bucket/other/docs.lance",
    "s3://bucket/db2",
    "s3://bucket/db-2/docs.lance",
    "s3://bucket-2/db/docs.lance",
    "s3://BUCKET/db/docs.lance",
    "s3://bucket/DB/docs.lance",
    "s3://bucket/db/../other/docs.lance",
    "s3://bucket/db/..",
    "s3://bucket/db/../../../etc",
    "s3://bucket/db/%2e%2e/other/docs.lance",
    "s3://bucket/db/.%2E/other/docs.lance",
    "s3://bucket/db/%252e%252e/other/docs.lance",
    "s3://bucket/db/x%2f..%2f..%2fother/docs.lance",
    "s3://bucket/db/%25252525252e/x",
    "s3://bucket/other/../db/docs.lance",  # a library that does not resolve it opens another key
    "s3://bucket/d%62/docs.lance",
    "s3://bucket//db/docs.lance",
    "s3://bucket/db\\..\\other",
    "s3://bucket/db/docs.lance?versionId=1",
    "s3://bucket/db/docs.lance#part",
    "s3://user:password@bucket/db/docs.lance",
    "s3://user@bucket/db/docs.lance",
    "s3://bucket:443/db/docs.lance",
    "s3://bucket@evil/db/docs.lance",
    "s3://evil#@bucket/db/docs.lance",
    "s3:/bucket/db/docs.lance",
    "s3:bucket/db/docs.lance",
    "s3:///bucket/db/docs.lance",
    "s3:////bucket/db/docs.lance",
    "//bucket/db/docs.lance",
    "bucket/db/docs.lance",
    "gs://bucket/db/docs.lance",
    "s3+ddb://bucket/db/docs.lance",
    "https://bucket/db/docs.lance",
    "memory://bucket/db/docs.lance",
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    "file:/etc/passwd",
    "file://localhost/proc/self/environ",
    "file-object-store:///etc/passwd",
    "file+uring:///etc/passwd",
    "/etc/passwd",
    "~/.aws/credentials",
    " s3://bucket/db/docs.lance",
    "s3://bucket/db/docs.lance\n",
    "s3://bucket/db/\x00",
    "s3://bucket/db/%00",
    "s3://bucket/db/\ud800",
    "",
)


@pytest.mark.parametrize("place", ["https://Archive.example/scans", "https://archive.example:443/scans"])
def test_the_case_of_a_web_server_and_its_usual_port_do_not_matter(place: str) -> None:
    places = Places(allow_places([place]))
    for server in ("archive.example", "ARCHIVE.example", "archive.example:443", "archive.EXAMPLE:"):
        assert places.hold(f"https://{server}/scans/1.png")
    for server in ("archive.example:80", "archive.example:444", "archive.example.", "user@archive.example"):
        assert not places.hold(f"https://{server}/scans/1.png")
    assert not places.hold("http://archive.example/scans/1.png")
    assert not places.hold("https://archive.example/SCANS/1.png")
    assert Places(("http://archive.example:80",)).hold("http://archive.example/1.png")
    assert not Places(("s3://Bucket",)).hold("s3://bucket/1.png")


@pytest.mark.parametrize("uri", IN_STORE)
def test_what_lies_in_a_folder_of_a_store_may_be_opened(uri: str) -> None:
    assert Places((STORE,)).hold(uri)


@pytest.mark.parametrize("uri", OUT_OF_STORE)
def test_what_may_lie_elsewhere_must_not_be_opened(uri: str) -> None:
    places = Places((STORE,))
    assert not places.hold(uri)
    with pytest.raises(InvalidInput, match=r"A blob names .* lies in no place .*allowed_places"):
        places.check(uri, "A blob")


@pytest.mark.parametrize(
    ("place", "inside", "outside"),
    [
        ("s3://bucket", "s3://bucket/any/key", "s3://bucket-2/any/key"),
        ("az://photos/db", "az://photos/db/1.jpg", "abfss://photos@account.dfs.core.windows.net/db/1.jpg"),
        (
            "abfss://photos@one.dfs.core.windows.net/db",
            "abfss://photos@one.dfs.core.windows.net/db/1.jpg",
            "abfss://photos@two.dfs.core.windows.net/db/1.jpg",
        ),
        ("s3://bucket/my%20db", "s3://bucket/my%20db/1.jpg", "s3://bucket/my db/1.jpg"),
        ("memory://db", "memory://db/docs.lance", "memory://other/docs.lance"),
    ],
)
def test_a_place_is_compared_by_scheme_host_and_folder(place: str, inside: str, outside: str) -> None:
    assert Places((place,)).hold(inside)
    assert not Places((place,)).hold(outside)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `db` with links into it and out of it, which is also linked from elsewhere, and a file beside it."""
    for folder in ("db/photos", "db/my photos", "db/100%41", "db-2", "other/deep"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "other/secret").write_text("secret")
    os.symlink(tmp_path / "other", tmp_path / "db/link")
    os.symlink(tmp_path / "other/deep", tmp_path / "db/photos/deep")
    os.symlink("photos", tmp_path / "db/pictures")
    os.symlink(tmp_path / "db", tmp_path / "alias")
    monkeypatch.chdir(tmp_path / "db")
    return tmp_path


@pytest.mark.parametrize(
    "uri",
    [
        "{0}/db", "{0}/db/docs.lance", "file://{0}/db/docs.lance", "FILE://{0}/db/docs.lance", "file:{0}/db/docs.lance",
        "file://localhost{0}/db/docs.lance", "file-object-store://{0}/db/docs.lance", "{0}/alias/docs.lance",
        "{0}/db/pictures/1.jpg", "{0}/db/photos/../docs.lance", "{0}//db///docs.lance", "file://{0}/db/my%20photos/1.jpg",
        "{0}/db/my photos/1.jpg", "{0}/db/100%41/1.jpg", "docs.lance", "photos/1.jpg", "{0}/other/../db/docs.lance",
    ],
)  # fmt: skip
def test_links_and_dots_that_stay_in_a_folder_are_followed(disk: Path, uri: str) -> None:
    assert Places((str(disk / "db"),)).hold(uri.format(disk))
    assert Places((str(disk / "alias"),)).hold(uri.format(disk))
    assert Places((f"file-object-store://{disk}/db",)).hold(uri.format(disk))


@pytest.mark.parametrize(
    "uri",
    [
        "{0}", "{0}/db-2/docs.lance", "{0}/other/secret", "{0}/db/../other/secret", "{0}/db/link/secret",
        "file://{0}/db/link/secret", "{0}/db/photos/deep/../secret",
        "file://{0}/db/%2e%2e/other/secret", "file://{0}/db/%252e%252e/other/secret", "{0}/db/%2e%2e/other/secret",
        "file:///db/docs.lance", "file://other{0}/db/docs.lance", "file://{0}/db\\..\\other\\secret", "../other/secret",
        "file:db/docs.lance", "file://{0}/db/docs.lance?x", "~/docs.lance", "/proc/self/root{0}/other/secret",
        "/proc/self/environ", "unix://{0}/db/docs.lance", "s3://{0}/db/docs.lance",
    ],
)  # fmt: skip
def test_links_and_dots_that_leave_a_folder_are_seen(disk: Path, uri: str) -> None:
    assert not Places((str(disk / "db"),)).hold(uri.format(disk))


def test_a_place_that_the_user_allows_reaches_every_table_and_is_no_secret(tmp_path: Path) -> None:
    db = connect(tmp_path / "db", allowed_places=["s3://bucket/photos", tmp_path / "more"])
    location = db.location("docs")
    assert location.places.roots == (str(tmp_path / "db"), str(tmp_path / "more"), "s3://bucket/photos")
    assert json.loads(location.access["storage_options"][PLACES]) == list(location.places.roots)
    assert not secret_values(dict(db.options))
    assert not connect(tmp_path / "db").options
    container = "abfss://photos@account.dfs.core.windows.net"
    assert not secret_values(dict(connect(tmp_path / "db", allowed_places=[container]).options))


def test_a_table_of_a_catalog_may_name_its_own_folder_and_the_folder_that_the_catalog_lists(tmp_path: Path) -> None:
    connect(tmp_path).create_table("docs", {"id": [1]})
    db = connect_namespace("dir", {"root": str(tmp_path)}, allowed_places=["s3://bucket/photos"])
    roots = db.open_table("docs").location.places.roots
    assert roots == (str(tmp_path / "docs.lance"), str(tmp_path), "s3://bucket/photos")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("s3://bucket", "is one place. Give a list"),
        (["s3://user:password@bucket"], "credentials as storage_options"),
        (["s3:/bucket"], "It needs two slashes"),
        ([7], "neither a path nor a URI"),
        (7, "no list of paths"),
        (["s3://"], "which is no folder"),
    ],
)
def test_a_place_that_is_none_is_refused(given: object, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as raised:
        allow_places(given)
    assert "password@" not in str(raised.value)


def test_a_location_of_before_knows_its_database() -> None:
    assert TableLocation("s3://bucket/db/docs.lance", "docs").places == Places((STORE,))
