"""`read_file`, with files of a disk, of an object store, and of a web server."""

from __future__ import annotations

import asyncio
import gzip
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_geneva import Table, connect, udf
from airflow_geneva.errors import InvalidInput, JobFailed
from airflow_geneva.functions import read_file
from airflow_geneva.functions.files import _ReadFile
from tests.support.object_store import SECRET, Bucket

REFUSALS: dict[str, tuple[int, float, dict[str, str]]] = {
    "flaky": (503, 2, {}),
    "closed": (503, 1, {"retry_after": "7"}),
    "busy": (429, 1, {"retry_after": "0"}),
    "down": (500, math.inf, {}),
    "missing": (404, math.inf, {}),
}
"""By kind of path: status, how often a path is refused, and headers."""


class Web(ThreadingHTTPServer):
    """A web server whose paths say how it answers; `asked` counts requests, and `most` those at a time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked = Counter[str]()
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Web

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server, (_, kind, *rest) = self.server, self.path.partition("?")[0].split("/")
        with server.lock:
            server.asked[self.path] += 1
            tries = server.asked[self.path]
            server.now += 1
            server.most = max(server.most, server.now)
        time.sleep(2 if kind == "hangs" else 0.02 if kind == "slow" else 0)
        with server.lock:
            server.now -= 1
        if kind == "moved":
            self.answer(302, location=f"{server.url}/file/{rest[0]}")
        elif kind == "to":
            self.answer(302, location=f"http://127.0.0.1:{rest[0]}/slow/{rest[1]}")
        elif kind == "away":
            self.answer(302, location=f"http://localhost:{server.server_port}/file/{rest[0]}")
        elif kind == "round":
            self.answer(302, location=self.path)
        elif kind in REFUSALS and tries <= REFUSALS[kind][1]:
            status, _, headers = REFUSALS[kind]
            self.answer(status, **headers)
        elif kind == "private" and self.headers.get("authorization") != "Bearer of-the-archive-1":
            self.answer(401)
        elif kind == "cut":
            self.answer(200, b"half", length=100)
            self.close_connection = True
        elif kind == "drips":
            self.drip(100)
        elif kind == "packed":
            self.answer(200, gzip.compress(b"z" * int(rest[0])), content_encoding="gzip")
        elif kind == "big":
            self.answer(200, b"x" * 3_000)
        else:
            self.answer(200, "/".join(rest).encode())

    def drip(self, parts: int) -> None:
        self.send_response(200)
        self.send_header("content-length", str(parts))
        self.end_headers()
        with suppress(OSError):
            for _ in range(parts):
                time.sleep(0.1)
                self.wfile.write(b"x")

    def answer(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def web() -> Iterator[Web]:
    with running_web() as server:
        yield server


@contextmanager
def running_web() -> Iterator[Web]:
    server = Web()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_geneva.functions.files._FIRST_PAUSE", 0.01)


def links(folder: Path, uris: Sequence[str | None], places: object = ()) -> Table:
    db = connect(folder / "db", allowed_places=places)  # type: ignore[arg-type]
    return db.create_table("links", pa.table({"id": range(len(uris)), "uri": pa.array(uris, pa.string())}))


def read(table: Table, **settings: object) -> tuple[list[bytes | None], dict[int, str]]:
    """Compute a column of files; return its values, and the messages of the rows that failed."""
    table.add_columns({"file": (read_file(on_error="skip", **settings), ["uri"])})  # type: ignore[arg-type]
    table.backfill("file", runner="inline")
    failed = {
        record.row_address: f"{record.exception.removeprefix('builtins.')}: {record.message}"
        for record in table.get_errors()
    }
    return table.to_arrow().column("file").to_pylist(), failed


def test_files_of_the_database_and_of_allowed_places_are_read_and_a_missing_one_fails_its_row(tmp_path: Path) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "scans").mkdir()
    (tmp_path / "db" / "one.txt").write_bytes(b"one")
    (tmp_path / "scans" / "two words.txt").write_bytes(b"two")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "scans" / "out").symlink_to(tmp_path / "secret")
    uris = [f"{tmp_path}/db/one.txt", f"file://{tmp_path}/scans/two words.txt", None, f"{tmp_path}/scans/none"]
    uris += [f"{tmp_path}/secret", f"{tmp_path}/scans/../secret", f"{tmp_path}/scans/out", "one.txt", "/dev/zero"]
    values, failed = read(links(tmp_path, uris, [tmp_path / "scans"]))
    assert values == [b"one", b"two", *[None] * 7]
    assert sorted(failed) == [3, 4, 5, 6, 7, 8]
    assert failed[3].startswith("FileNotFoundError: There is no file ")
    assert all("lies in no place that may be opened" in failed[row] for row in (4, 5, 6, 8))
    assert "Store whole paths or URIs" in failed[7]


def test_a_file_uri_is_decoded_and_a_path_is_not(tmp_path: Path) -> None:
    names = ["größe 1.txt", "a#b?.txt", "100%.txt", "lit%20x.txt"]
    for name in names:
        (tmp_path / name).write_text(name)
    uris = [(tmp_path / name).as_uri() for name in names]
    uris += [f"file://{tmp_path}/lit%20x.txt", f"{tmp_path}/lit%20x.txt", f"{tmp_path}/gr%C3%B6%C3%9Fe%201.txt"]
    values, failed = read(links(tmp_path, uris, [tmp_path]))
    assert values == [*(name.encode() for name in names), b"lit%20x.txt", b"lit%20x.txt", None]
    assert failed[6].startswith("FileNotFoundError")
    (tmp_path / "lit x.txt").write_text("of the URI")
    assert read(links(tmp_path / "again", uris[4:5], [tmp_path]))[0] == [b"of the URI"]


def test_a_web_server_is_asked_again_after_what_passes_and_not_after_what_stays(tmp_path: Path, web: Web) -> None:
    kinds = ["file/a?size=2", "moved/b", "flaky/c", "busy/d", "missing/e", "down/f", "cut/g", "big/h", "round/i"]
    values, failed = read(
        links(tmp_path, [f"{web.url}/{kind}" for kind in kinds], [web.url]), max_bytes=2_000, retries=2
    )
    assert values == [b"a", b"b", b"c", b"d", *[None] * 5]
    said = {4: "FileNotFoundError", 5: "ConnectionError", 6: "ConnectionError", 7: "ValueError", 8: "ValueError"}
    assert {row: text.partition(":")[0] for row, text in failed.items()} == said
    assert "more than 2,000 bytes" in failed[7]
    asked = {path.split("/")[1]: count for path, count in web.asked.items() if not path.startswith("/file")}
    assert asked == {"moved": 1, "flaky": 3, "busy": 2, "missing": 1, "down": 3, "cut": 3, "big": 1, "round": 6}


def test_a_redirect_leads_into_allowed_places_only(tmp_path: Path, web: Web) -> None:
    elsewhere = f"http://localhost:{web.server_port}"
    values, failed = read(links(tmp_path, [f"{web.url}/away/x", f"{elsewhere}/file/y"], [web.url]))
    assert values == [None, None]
    assert "A redirect of" in failed[0]
    assert elsewhere in failed[0]
    assert list(web.asked) == ["/away/x"]
    both = links(tmp_path / "both", [f"{web.url}/away/x"], [web.url, elsewhere])
    assert read(both) == ([b"x"], {})


def test_a_place_has_headers_which_go_nowhere_else(tmp_path: Path, web: Web) -> None:
    places = {web.url: None, f"{web.url}/private": {"authorization": "Bearer of-the-archive-1"}}
    table = links(tmp_path, [f"{web.url}/private/x", f"{web.url}/moved/y"], places)
    assert read(table) == ([b"x", b"y"], {})
    for shown in (repr(table), repr(connect(tmp_path / "db", allowed_places=places))):
        assert "of-the-archive" not in shown
    anonymous = links(tmp_path / "other", [f"{web.url}/private/x"], [web.url])
    values, failed = read(anonymous)
    assert (values, failed[0].partition(":")[0]) == ([None], "PermissionError")


def test_one_try_takes_no_longer_than_the_timeout(tmp_path: Path, web: Web) -> None:
    values, failed = read(links(tmp_path, [f"{web.url}/hangs/x"], [web.url]), timeout=0.1, retries=0)
    assert values == [None]
    assert "TimeoutError" in failed[0]


def test_a_server_that_sends_slowly_fails_its_own_files_only(tmp_path: Path, web: Web) -> None:
    slow = f"http://localhost:{web.server_port}"
    uris = [f"{slow}/drips/{at}" if at % 2 else f"{web.url}/file/{at}" for at in range(40)]
    values, failed = read(links(tmp_path, uris, [web.url, slow]), timeout=1.5, retries=0, per_host=10)
    assert values == [None if at % 2 else str(at).encode() for at in range(40)]
    assert all("TimeoutError" in text for text in failed.values())


def test_a_compressed_answer_is_expanded_up_to_the_limit(tmp_path: Path, web: Web) -> None:
    uris = [f"{web.url}/packed/1000", f"{web.url}/packed/5000000", f"{web.url.upper()}/file/x", f"{web.url}/a%5C../b"]
    values, failed = read(links(tmp_path, uris, [web.url]), max_bytes=2_000)
    assert values == [b"z" * 1_000, None, b"x", None]
    assert "more than 2,000 bytes" in failed[1]
    assert "no place that may be opened" in failed[3]


def test_a_host_is_asked_for_a_few_files_at_a_time(tmp_path: Path, web: Web) -> None:
    table = links(tmp_path, [f"{web.url}/slow/{at}" for at in range(40)], [web.url])
    values, failed = read(table, per_host=4)
    assert (values, failed) == ([str(at).encode() for at in range(40)], {})
    assert web.most == 4


def test_a_host_behind_redirects_of_many_is_asked_for_a_few_files_at_a_time(tmp_path: Path, web: Web) -> None:
    with ExitStack() as stack:
        others = [stack.enter_context(running_web()) for _ in range(4)]
        uris = [f"{others[at % 4].url}/to/{web.server_port}/{at}" for at in range(40)]
        values, failed = read(links(tmp_path, uris, [web.url, *(other.url for other in others)]), per_host=4)
    assert (values, failed) == ([str(at).encode() for at in range(40)], {})
    assert web.most == 4


def test_a_server_that_is_closed_for_a_while_is_asked_when_it_says(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        paused.append(seconds)
        await sleep(0)

    monkeypatch.setattr("airflow_geneva.functions.files.asyncio.sleep", note)
    assert read(links(tmp_path, [f"{web.url}/closed/x"], [web.url])) == ([b"x"], {})
    assert 7.0 in paused


@udf(data_type=pa.int64(), preprocess=read_file(), on_error="skip")
def size(file: bytes) -> int:
    return len(file)


@udf(data_type=pa.int64(), preprocess=read_file(max_in_flight=8))
def sizes(files: pa.LargeBinaryArray) -> pa.Array:
    import pyarrow.compute as pc

    return pc.cast(pc.binary_length(files), pa.int64())


def test_it_reads_ahead_of_a_function_many_files_at_a_time(tmp_path: Path, web: Web) -> None:
    uris = [f"{web.url}/slow/{'x' * (at % 7)}" for at in range(60)]
    table = links(tmp_path, [*uris, f"{web.url}/missing/x"], [web.url])
    table.add_columns({"size": (size, ["uri"])})
    assert table.backfill("size", runner="inline").rows_failed == 1
    assert table.to_arrow().column("size").to_pylist() == [*[at % 7 for at in range(60)], None]
    assert web.most > 4
    few = links(tmp_path / "few", uris, [web.url])
    few.add_columns({"size": (sizes, ["uri"])})
    web.most = 0
    few.backfill("size", runner="inline")
    assert few.to_arrow().column("size").to_pylist() == [at % 7 for at in range(60)]
    assert 1 < web.most <= 8


def test_the_job_fails_at_the_row_of_the_missing_file_if_nothing_is_skipped(tmp_path: Path) -> None:
    table = links(tmp_path, [f"{tmp_path}/db/none"])
    table.add_columns({"size": (sizes, ["uri"])})
    with pytest.raises(JobFailed, match=r"There is no file .*/db/none"):
        table.backfill("size", runner="inline")


def test_a_query_reads_files_too_and_a_call_for_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "one").write_bytes(b"1")
    table = links(tmp_path, [f"{tmp_path}/db/one"])
    found = table.query().select({"file": (read_file(), ["uri"])}).to_arrow()
    assert found.column("file").to_pylist() == [b"1"]
    with pytest.raises(InvalidInput, match="is called for none"):
        asyncio.run(_call(f"{tmp_path}/db/one"))


async def _call(uri: str) -> object:
    return await read_file()(uri)


@pytest.mark.slow
@pytest.mark.core
def test_an_object_store_is_read_with_the_storage_options_of_the_place(
    tmp_path: Path, bucket: Bucket, options: dict[str, str]
) -> None:
    names = ["one page.bin", "é.txt", "a%20b.txt", "x[1].txt", "a~b.txt", "100%.txt"]
    for name in names:
        bucket.put(f"scans/{name}", name.encode())
    uris = [f"{bucket.uri}/scans/{name}" for name in [*names, "none", "é none"]]
    table = links(tmp_path, [*uris, f"{bucket.uri}//scans/one page.bin"], {f"{bucket.uri}/scans": options})
    values, failed = read(table, retries=0)
    assert values == [*map(str.encode, names), None, None, None]
    assert failed[6].startswith("FileNotFoundError")
    assert failed[7].startswith("FileNotFoundError")
    assert "no place that may be opened" in failed[8]
    assert SECRET not in repr(connect(tmp_path / "db", allowed_places={f"{bucket.uri}/scans": options}))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_bytes": "many"}, "max_bytes"),
        ({"timeout": 0}, "timeout=0"),
        ({"retries": -1}, "retries"),
        ({"per_host": 0}, "per_host"),
    ],
)
def test_bad_settings_are_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        read_file(**given)  # type: ignore[arg-type]


def test_how_files_are_read_does_not_change_the_version() -> None:
    assert read_file(retries=1).code_version == read_file(timeout=5, max_bytes=10, per_host=1).code_version
    assert _ReadFile.revision == 1
