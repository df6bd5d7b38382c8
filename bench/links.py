"""How busy a function is whose files lie behind links, on a web server that takes 50 ms to answer."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import connect, udf
from airflow_geneva.functions import read_file
from bench import busy

BATCH = 50
FILE = b"\x89PNG" * 2_500
_settings: dict[str, Any] = {"data_type": pa.int64(), "version": "1", "batch_size": BATCH}


def _use(seconds: float, files: pa.LargeBinaryArray) -> pa.Array:
    busy.use_device(seconds * len(files))
    return pc.cast(pc.binary_length(files), pa.int64())


@udf(**_settings, preprocess=read_file())
def four_ms(files: pa.LargeBinaryArray) -> pa.Array:
    """Simulate a device that takes 4 ms a file."""
    return _use(0.004, files)


@udf(**_settings, preprocess=read_file(per_host=64, max_in_flight=64))
def two_ms(files: pa.LargeBinaryArray) -> pa.Array:
    """Simulate a device that takes 2 ms a file, too fast for the 16 files at a time of one server."""
    return _use(0.002, files)


FUNCTIONS = {"4 ms a file": four_ms, "2 ms a file, per_host=64, max_in_flight=64": two_ms}


def measure(folder: str, links: int, per_fragment: Sequence[int], ms: int, runners: Sequence[str]) -> dict[str, Any]:
    """Read the files of all links ahead of a function; return the seconds, and the fraction that the function ran.

    Args:
        per_fragment: numbers of rows of a fragment, one table each.
        ms: delay of every answer of the web server.
    """
    os.environ[busy.CALLS] = str(Path(folder) / "calls")
    Path(folder).mkdir(parents=True)
    found = []
    with _web(ms / 1_000) as url:
        db = connect(Path(folder) / "db", allowed_places=[url])
        rows = pa.table({"uri": [f"{url}/{number}.png" for number in range(links)]})
        for size in per_fragment:
            table = db.create_table(f"links{size}", rows, max_rows_per_file=size)
            for runner, (name, function) in product(runners, FUNCTIONS.items()):
                column = f"{function.name}_{runner}"
                table.add_columns({column: (function, ["uri"])})
                with busy.measured() as run:
                    table.backfill(column, runner=runner, concurrency=2)
                found.append({**run, "function": name, "runner": runner, "rows": size})
                if table.to_arrow().column(column).to_pylist() != [len(FILE)] * links:
                    raise SystemExit("Case links: a value is wrong.")
    return {"runs": found, "links": links, "ms": ms}


@contextmanager
def _web(delay: float) -> Iterator[str]:
    """Run a web server in a process of its own; yields its address."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, delay), daemon=True)
    process.start()
    yield f"http://127.0.0.1:{here.recv()}"
    process.kill()
    process.join()


def _serve(port: Connection, delay: float) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(FILE), FILE)

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await asyncio.sleep(delay)
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(respond, "127.0.0.1", 0, backlog=256)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())
