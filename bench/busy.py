"""How busy a device is if rows are decoded first: a bare loop, pylance alone, and ours without and with a stage."""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_geneva import connect, udf
from airflow_geneva.database import Database
from bench import floor
from tests.support.latency import SlowProxy
from tests.support.object_store import Bucket, options_of, running_server
from tests.support.s3_server import WEED

SECONDS = 0.004
BATCH = 25
_IMAGE_BYTES = 20_000
_PIXELS = 1_000
CALLS = "GENEVA_BENCHCALLS"
_CALL = struct.Struct("<qdd")
_BINARY = pa.list_(pa.uint8(), _PIXELS)
_device = threading.Lock()


def decode(image: bytes) -> np.ndarray:
    """Use 4 ms of CPU in a library that releases the GIL, as image libraries do."""
    until = time.thread_time() + SECONDS
    while time.thread_time() < until:
        hashlib.pbkdf2_hmac("sha256", image[:64], b"", 200)
    return np.frombuffer(image[:_PIXELS], np.uint8)


def compute(pixels: pa.FixedSizeListArray) -> pa.Array:
    """Simulate a device that takes 4 ms per row and runs one call at a time."""
    use_device(SECONDS * len(pixels))
    return pa.array(pixels.flatten().to_numpy()[::_PIXELS].astype(np.int64))


def use_device(seconds: float) -> None:
    """Wait for a simulated device, which runs one call at a time; record start and end of the call."""
    with _device:
        began = time.time()
        time.sleep(seconds)
        call = _CALL.pack(os.getpid(), began, time.time())
    handle = os.open(os.environ[CALLS], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, call)
    os.close(handle)


def decode_and_compute(image: pa.BinaryArray) -> pa.Array:
    return compute(_together(map(decode, image.to_pylist())))


def compute_bytes(image: pa.BinaryArray) -> pa.Array:
    return compute(_together(np.frombuffer(one[:_PIXELS], np.uint8) for one in image.to_pylist()))


def _together(decoded: Iterable[np.ndarray]) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(list(decoded))), type=_BINARY)


_decode = udf(data_type=_BINARY)(decode)
_int = pa.int64()
without = udf(data_type=_int, name="without", version="1", batch_size=BATCH)(decode_and_compute)
in_a_thread = udf(data_type=_int, name="in_a_thread", version="1", batch_size=BATCH, preprocess=_decode)(compute)
in_two_processes = udf(
    data_type=_int, name="in_two_processes", version="1", batch_size=BATCH, preprocess=_decode, preprocess_workers=2
)(compute)
decoded = udf(data_type=_int, name="decoded", version="1", batch_size=BATCH)(compute_bytes)
OURS = {
    "ours, images that need no decoding": decoded,
    "ours, one function": without,
    "stage, a thread": in_a_thread,
    "stage, two processes": in_two_processes,
}


def measure(folder: str, fragments: int, images: int, ms: int, runners: Sequence[str]) -> dict[str, Any]:
    """Run each side on a disk and on a slow object store; return the seconds, and the fraction the device was busy.

    Args:
        images: number of images in a fragment. ms: delay of every request to the store.
    """
    os.environ[CALLS] = str(Path(folder) / "calls")
    Path(folder, "server").mkdir(parents=True)
    pixels = np.random.default_rng(0)
    rows = pa.table({"image": pa.array([pixels.bytes(_IMAGE_BYTES) for _ in range(fragments * images)])})
    near = connect(Path(folder) / "db")
    found = {"disk": _sides(near, None, rows, images, runners[:1])}
    if WEED.exists():
        with running_server(Path(folder, "server")) as endpoint, SlowProxy(endpoint).running() as proxy:
            proxy.seconds = ms / 1_000
            uri = f"s3://{Bucket(endpoint).name}/db"
            near = connect(uri, storage_options=options_of(endpoint))
            far = connect(uri, storage_options=options_of(proxy.url))
            found[f"{ms} ms"] = _sides(near, far, rows, images, runners)
    return {"at": found, "limit": _loop(rows), "fragments": fragments, "images": images}


def _loop(rows: pa.Table) -> dict[str, float]:
    """The limit: decoded rows in memory."""
    pixels = _together(np.frombuffer(image[:_PIXELS], np.uint8) for image in rows.column("image").to_pylist())
    with measured() as found:
        for start in range(0, len(pixels), BATCH):
            compute(pixels[start : start + BATCH])
    return found


def _sides(
    near: Database, far: Database | None, rows: pa.Table, images: int, runners: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Run each side through the delayed store `far`, on tables that are created through `near`."""
    table = near.create_table("images", rows, max_rows_per_file=images)
    expected = [image[0] for image in rows.column("image").to_pylist()]
    found: dict[str, dict[str, float]] = {}
    through = (far or near).open_table("images")
    floor.add_column(table.uri, "alone", without, dict(table.location.options))
    with measured() as found["pylance alone"]:
        floor.fill_column(through.uri, "image", "alone", without, BATCH, options=dict(through.location.options))
    made = ["alone"]
    for runner in runners:
        for name, function in OURS.items():
            if runner == "spark" and function is without:
                continue
            made.append(f"{function.name}_{runner}")
            table.add_columns({made[-1]: (function, ["image"])})
            with measured() as found[f"{name}, {runner}"]:
                opened = (far or near).open_table("images")
                opened.backfill(made[-1], udf=function, runner=runner, concurrency=2)
    values = near.open_table("images").to_arrow()
    if wrong := [name for name in made if values.column(name).to_pylist() != expected]:
        raise SystemExit(f"Case busy: values of {wrong} are wrong.")
    return found


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Measure the seconds of a block, and the fraction of the time from the first to the last call the device works."""
    found: dict[str, float] = {}
    calls = Path(os.environ[CALLS])
    calls.write_bytes(b"")
    began = time.perf_counter()
    yield found
    found["seconds"] = time.perf_counter() - began
    by_process = defaultdict[int, list[tuple[float, float]]](list)
    for process, begin, end in _CALL.iter_unpack(calls.read_bytes()):
        by_process[process].append((begin, end))
    worked = sum(end - begin for one in by_process.values() for begin, end in one)
    between = sum(max(end for _, end in one) - min(begin for begin, _ in one) for one in by_process.values())
    found |= {"worked": worked, "busy": worked / between, "devices": len(by_process)}
