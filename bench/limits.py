"""Do many processes, some of which are killed, use a service's limit fully without exceeding it?

Each process computes its own table with a function that calls a server on loopback; the server enforces the limit for
all of them, and counts.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from airflow_geneva import RateLimit, connect, report, udf
from tests.support.openai_server import Counts, OpenAIServer

_PORT, _PER_MINUTE = "BENCH_LIMITS_PORT", "BENCH_LIMITS_PER_MINUTE"
_ROWS_PER_REQUEST = 10
_WARM_SECONDS = 10
_VECTOR = pa.list_(pa.float32(), 8)


@udf(
    data_type=_VECTOR,
    limit=RateLimit("service", requests_per_minute=float(os.environ.get(_PER_MINUTE, 60))),
    batch_size=_ROWS_PER_REQUEST,
)
class Embed:
    """Embeds texts over one connection, which lasts as long as its process."""

    def __init__(self) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", int(os.environ[_PORT]))

    def __call__(self, text: pa.StringArray) -> pa.Array:
        body = json.dumps({"model": "m", "input": text.to_pylist()})
        self.connection.request("POST", "/v1/embeddings", body, {"Authorization": "Bearer key"})
        answer = self.connection.getresponse()
        document = json.loads(answer.read())
        if answer.status != 200:
            raise Refused(answer)
        report(tokens=document["usage"]["total_tokens"])
        return pa.array([one["embedding"] for one in document["data"]], _VECTOR)


class Refused(Exception):
    """An error as HTTP clients raise it: the status and the headers are in the response."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        super().__init__(f"status {response.status}")
        self.response = response


def measure(
    folder: str,
    rows: int = 100_000,
    processes: int = 16,
    kills: int = 8,
    per_minute: int = 6_000,
    latency: float = 0.05,
) -> dict[str, Any]:
    """Compute the tables, and return the server's counts."""
    db = connect(folder)
    for number in range(processes):
        texts = [f"text {at} of {number}" for at in range(rows // processes)]
        db.create_table(f"docs{number}", pa.table({"text": texts})).add_columns({"v": Embed})
    with OpenAIServer(requests_per_minute=per_minute, latency=latency) as server:
        began = time.monotonic()
        killed = _run(folder, processes, kills, server, rows // _ROWS_PER_REQUEST, per_minute)
        seconds, counts = time.monotonic() - began, server.counts()
    found = sum(connect(folder).open_table(f"docs{number}").count_rows("v IS NOT NULL") for number in range(processes))
    used, warm = _used(counts, per_minute)
    return {
        "processes": processes,
        "rows": rows,
        "computed": found,
        "kills": killed,
        "per_minute": per_minute,
        "requests": counts.requests,
        "refused": counts.refused,
        "paid_again": counts.paid_again,
        "used": used,
        "warm_seconds": warm,
        "seconds": seconds,
    }


def _run(folder: str, processes: int, kills: int, server: OpenAIServer, requests: int, per_minute: int) -> int:
    """Run a process for each table until all are done; return how many were killed meanwhile."""
    environment = {**os.environ, _PORT: str(server.port), _PER_MINUTE: str(per_minute)}

    def start(number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "bench.limits", folder, str(number)]
        return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[1])

    running = {number: start(number) for number in range(processes)}
    drawn, killed = random.Random(1), 0
    while running:
        time.sleep(0.05)
        # Kill between 20 % and 80 % of the work.
        due = requests * (0.2 + 0.6 * killed / max(kills, 1))
        if killed < kills and server.counts(paid=False).requests >= due:
            number = drawn.choice(sorted(running))
            running[number].send_signal(signal.SIGKILL)
            running[number].wait()
            running[number] = start(number)
            killed += 1
        for number, process in list(running.items()):
            if process.poll() is not None:
                if process.returncode:
                    raise RuntimeError(f"Process {number} ended with {process.returncode}.")
                del running[number]
    return killed


def _used(counts: Counts, per_minute: float) -> tuple[float, int]:
    """Return the used fraction of the limit, from ten seconds after the first request until 90 % of the requests."""
    by_second = {int(second): admitted for second, admitted in counts.admitted.items()}
    first, total, passed, last = min(by_second), sum(by_second.values()), 0, 0
    for second in sorted(by_second):
        passed += by_second[second]
        if passed >= 0.9 * total:
            last = second
            break
    begin = min(first + _WARM_SECONDS, last)
    admitted = sum(count for second, count in by_second.items() if begin <= second < last)
    return admitted * 60 / (per_minute * max(last - begin, 1)), last - begin


def _compute(folder: str, number: str) -> None:
    table = connect(folder).open_table(f"docs{number}")
    table.backfill("v", runner="inline", checkpoint_size=_ROWS_PER_REQUEST)


if __name__ == "__main__":
    _compute(*sys.argv[1:])
