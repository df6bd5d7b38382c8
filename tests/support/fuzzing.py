"""Documents of every kind, changed at random, and what reads them: run as a program, it prints what went wrong.

    python -m tests.support.fuzzing FOLDER COUNT SEED

The process is one of its own, so that a crash is seen, and the memory is that of the documents alone.
"""

from __future__ import annotations

import base64
import json
import random
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_geneva import connect
from airflow_geneva.engine.checkpoint.facts import load_state
from airflow_geneva.engine.checkpoint.keys import key_to_path
from airflow_geneva.engine.checkpoint.records import read_range, read_staged
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.checkpoint.submissions import Submissions
from airflow_geneva.engine.checkpoint.value_cache import ValueCache
from airflow_geneva.engine.checkpoint.view_snapshot import load_snapshot, snapshot_key
from airflow_geneva.engine.cleanup.in_use import planned_places
from airflow_geneva.engine.job.error_records import count_errors, read_errors
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.status import DAMAGED, read_job
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.siblings import Sibling
from airflow_geneva.engine.limits.budget import Budget
from airflow_geneva.engine.plan.saved_plan import load_plan
from airflow_geneva.engine.plan.shard import Shard
from airflow_geneva.engine.plan.swap_plan import SwapPlan
from airflow_geneva.engine.storage.arrow_documents import from_bytes, to_bytes
from airflow_geneva.engine.udf.code_archive import DamagedArchive, read_entries
from airflow_geneva.engine.udf.definition import FORMER_NAMES_KEY, PROMOTED_KEY, UDF_KEY, Promoted, former_names
from airflow_geneva.engine.udf.settings import UdfDefinition
from airflow_geneva.engine.views.definition import QUERY_KEY, ViewDefinition
from airflow_geneva.engine.views.state import AdvanceNote, read_advance_note, write_advance_note
from airflow_geneva.errors import GenevaError
from tests.support.hostile import Site

MOST_KB = 200 * 1024
MOST_SECONDS = 20.0
NOW = "now"
"""The file with the document that is read at the moment."""


@dataclass
class Document:
    """A document as it was written, and what reads another content of it.

    Args:
        errors: what the reader raises for a document that it does not take, besides errors of the package.
        exact: whether checksums guard it, so that it is read as it was written, or counts as absent.
    """

    kind: str
    content: bytes
    read: Callable[[bytes], Any]
    errors: tuple[type[BaseException], ...] = ()
    exact: bool = False
    answer: Any = field(default=None, repr=False)


def _as_dict(answer: Any) -> Any:
    return answer and vars(answer)


class Corpus:
    """One document of each kind, of a database that is made in a folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.found = root, list[Document]()
        self.site = Site(root)
        self.table, self.view = self.site.database.open_table("docs"), self.site.database.open_view("v")
        self.checkpoints, self.base = self.table.location.checkpoints, Path(self.table.uri, "_checkpoints")
        self.of_view = Path(self.view.uri, "_checkpoints")
        self.other = connect(root / "other").create_table("t", pa.table({"x": [1]})).location.checkpoints
        for add in (self.plans, self.code, self.jobs, self.states, self.checkpoint_files, self.packs):
            add()
        for add in (self.submissions, self.values, self.row_ranges, self.definitions):
            add()

    def file(self, kind: str, path: Path, read: Callable[[], Any], exact: bool = False) -> None:
        content = path.read_bytes()

        def replaced(changed: bytes) -> Any:
            path.write_bytes(changed)
            try:
                return read()
            finally:
                path.write_bytes(content)

        self.found.append(Document(kind, content, replaced, exact=exact))

    def value(
        self, kind: str, content: str | bytes, read: Callable[[bytes], Any], *errors: type[BaseException]
    ) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.found.append(Document(kind, data, read, errors))

    def plans(self) -> None:
        plan = next(self.base.glob("jobs/*/plan-*.json"))
        job, header = self.checkpoints.folder("jobs", plan.parent.name), json.loads(plan.read_bytes())
        fingerprint = json.loads((plan.parent / "job.json").read_bytes())["plan"]
        wanted = [prefix for prefix, _ in load_plan(job, fingerprint).spec.reuse_rules.prefixes]
        self.file("plan", plan, lambda: planned_places(job, [plan.name], wanted))
        self.file("plan with a digest", plan, lambda: load_plan(job, fingerprint))
        shard = plan.parent / header["shards"][0]["file"]
        self.value("shard", shard.read_bytes(), lambda data: list(Shard.load(data).fragments), *DAMAGED)
        of_view = next(self.of_view.glob("jobs/*/plan-*.json"))
        swap = of_view.parent / json.loads(of_view.read_bytes())["swap"]["file"]
        self.value("swap", swap.read_bytes(), SwapPlan.load, *DAMAGED)

    def code(self) -> None:
        code = next(self.base.glob("jobs/*/*.zip")).read_bytes()
        self.value("code", code, lambda data: list(read_entries(data)), DamagedArchive)

    def jobs(self) -> None:
        ended = next(path for path in self.base.glob("jobs/*/job.json") if next(path.parent.glob("errors/*"), None))
        folder = JobFolder.of(self.checkpoints, ended.parent.name)
        for one in sorted(ended.parent.glob("*.json")):
            self.file(f"job's {one.name.partition('-')[0]}", one, lambda: read_job(folder))
        errors = next(ended.parent.glob("errors/*.arrow"))
        read = partial(read_errors, self.checkpoints, ended.parent.name)
        self.file("error records", errors, lambda: (read(), count_errors(folder.storage)))

    def states(self) -> None:
        ledger = next(self.base.glob("state/field-*/**/*.lance"))
        number = int(next(part for part in ledger.parts if part.startswith("field-")).removeprefix("field-"))
        self.file("ledger", ledger, lambda: load_state(self.checkpoints, number).facts.table.to_pylist())
        snapshot = next((self.of_view / "state" / "view").glob("swap*.lance"))
        key, of_view = snapshot_key(f"state/view/{snapshot.name}") or "", self.view.location.checkpoints
        self.file("snapshot", snapshot, lambda: load_snapshot(of_view, key), exact=True)
        write_advance_note(self.view.location, AdvanceNote("swap", 3, "snapshot"))
        note = next(path for path in self.of_view.rglob("*.json") if path.name == "watermark.json")
        self.file("note", note, lambda: read_advance_note(self.view.location))

    def checkpoint_files(self) -> None:
        store, readers = CheckpointStore(self.checkpoints), {"_range-": read_range, "_frag-": read_staged}
        for key in store.list_keys("udf-"):
            kind = "_range-" if "_range-" in key else "_frag-"
            path = self.base / key_to_path(key)
            if path.exists() and kind in readers:
                read = partial(readers.pop(kind), store, key)
                self.file(f"checkpoint {kind}", path, lambda read=read: _as_dict(read()), exact=True)

    def packs(self) -> None:
        store = CheckpointStore(str(self.root / "alone"))
        rows = pa.record_batch({"a": [*range(1_000)], "b": [f"text {number}" for number in range(1_000)]})
        for key in ("p.one", "p.two"):
            store[key] = rows
        store.pack(["p.one", "p.two"])

        def read() -> Any:
            with suppress(KeyError):
                return CheckpointStore(str(self.root / "alone"))["p.one"]

        self.file("pack", next((self.root / "alone").rglob("packed/*.lance")), read, exact=True)
        self.value("document of a pack", to_bytes(rows, "zstd"), from_bytes, ValueError)

    def submissions(self) -> None:
        keys, ids = [bytes([number]) * 16 for number in range(1, 4)], pa.array([1, 2, 3], pa.uint64())
        make = partial(Submissions, self.other, "job", "f", "1", "c", only_own=False)
        first = make()
        with first.begin(keys, ids) as submission:
            first.keep_handle(submission, {"id": "batch"})
        first.report(submission, [1])
        first.missed(submission)

        def read() -> Any:
            again = make()
            places = again.find(keys, ids)
            for one, _ in (place for row in places for place in row):
                one.may_be_underway()
                again.missed(one)
            return [[(one.name, one.job_id, position) for one, position in row] for row in places]

        for path in sorted(Path(first.storage.root).iterdir()):
            self.file(f"submission's {path.name.partition('.')[2]}", path, read)

    def values(self) -> None:
        keys = [bytes([number]) * 16 for number in range(1, 4)]
        make = partial(ValueCache, self.other, "f", "1", pa.string(), "id")
        make().write(keys, pa.array(["one", "two", "three"]))

        def read() -> Any:
            again = make()
            again.look()
            return [found and found[0][found[1]].as_py() for found in again.find(keys)]

        self.file("values", next(Path(self.other.root, "values").rglob("*.lance")), read)
        limit = Budget(1.0, 2.0, 3.0, 4.0, {"a": 1.0}, {"a": (1, 2.0)}, {"b": 1.0}, {"per_minute": 3})
        self.value("limit", limit.to_json(), lambda data: Budget.from_json(_text(data)))

    def row_ranges(self) -> None:
        chance = random.Random(1)
        for places in (2_000, 10**7):
            text = Ranges.from_offsets(np.array(sorted(chance.sample(range(places), 600)))).to_json()
            assert isinstance(text, str)
            packed = base64.b64decode(text)
            self.value(f"rows of {places}, packed", packed, lambda data: Ranges.from_json(_base64(data)), ValueError)
            self.value(f"rows of {places}", text, lambda data: Ranges.from_json(_text(data)), ValueError)

    def definitions(self) -> None:
        function = self.table.lance.schema.field("p").metadata[UDF_KEY.encode()]
        self.value("function", function, UdfDefinition.from_json)
        self.value("view", self.view.lance.schema.metadata[QUERY_KEY.encode()], ViewDefinition.from_json)
        self.value("siblings", Sibling(1 << 30, "a").to_json(), Sibling.of)
        promoted, named = Promoted("a", "b", (1, 2)).to_json(), '["a","b"]'
        self.value("promotion", promoted, lambda data: Promoted.of(_field({PROMOTED_KEY: data})))
        self.value("names", named, lambda data: former_names(pa.schema([_field({FORMER_NAMES_KEY: data})]), "a"))


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _field(metadata: dict[str, bytes]) -> pa.Field:
    return pa.field("a", pa.int8(), metadata=metadata)


def change(chance: random.Random, content: bytes, other: bytes) -> bytes:
    """Return a document with a few changes of one kind: flips, cuts, splices, lengths, copies, nesting, numbers."""
    data = bytearray(content)
    kind = chance.randrange(9)
    for _ in range(chance.choice([1, 1, 1, 2, 5, 20])):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.choice([1, 4, 8, 64, 1_000]))
        if kind == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            start = chance.randrange(len(other) + 1)
            data[at:end] = other[start : start + chance.choice([1, 16, 1_000, len(other)])]
        elif kind == 3:  # a length
            width = chance.choice([2, 4, 8])
            at -= at % width
            size = chance.choice([-1, 1, 1 << 10, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 40, 1 << 62])
            data[at : at + width] = (size % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 4:
            data[at:at] = data[at:end] * chance.choice([1, 2, 1_000])
        elif kind == 5:
            data[at:at] = chance.choice([b"[", b'{"a":', b"]", b"}", b'"', b"\\u", b"\x00", b"\xff"]) * chance.choice(
                [1, 70, 100_000]
            )
        elif kind == 6:
            data[at:end] = chance.randbytes(end - at)
        elif kind == 7:
            data[at:end] = b""
        else:  # a number in a text
            data[at:end] = chance.choice(
                [b"1e400", b"-1", b"9" * 5_000, b"null", b"true", b"[]", b"{}", b'""', b"99999999999", b"1e17"]
            )
    return bytes(data)


def memory(what: str) -> int:
    """Return a figure of this process in KB."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(f"{what}:")))


def run(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Read `count` changed documents; return the number of each kind, and what was not as it must be."""
    chance, wrong, read = random.Random(seed), list[str](), dict[str, int]()
    found = Corpus(folder).found
    for one in found:
        one.answer = one.read(one.content)
        assert one.answer is not None, one.kind
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far is the present one
    idle, worst = memory("VmRSS"), 0
    for number in range(count):
        one, other = found[number % len(found)], chance.choice(found)
        changed = change(chance, one.content, other.content)
        read[one.kind] = read.get(one.kind, 0) + 1
        (folder / NOW).write_bytes(f"{number} {one.kind}\n".encode() + changed)  # left behind by a crash
        began, answer, failed = time.monotonic(), None, ""
        try:
            answer = one.read(changed)
        except (GenevaError, *one.errors):
            pass
        except BaseException:
            failed = traceback.format_exc(limit=-6)
        if one.exact and answer is not None and repr(answer) != repr(one.answer):
            failed = f"another answer: {answer!r:.500}"
        if (seconds := time.monotonic() - began) > MOST_SECONDS:
            failed = f"{seconds:.0f} s"
        if (now := memory("VmHWM") - idle) > max(worst, 0):
            worst = now
            if worst > MOST_KB:
                failed = failed or f"{worst:,} KB"
                Path("/proc/self/clear_refs").write_text("5")
        if failed and len(wrong) < 30:
            wrong.append(f"{number} {one.kind}: {failed} of {changed!r:.300}")
    return {"documents": count, "kinds": read, "memory_kb": worst, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
