"""The commits that no event has announced: none is forgotten, whoever commits meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

from airflow_geneva.engine.job.outbox import OutboxEntry, read_outbox, write_outbox
from airflow_geneva.engine.run.announce import find_unannounced
from tests.support.counting import double
from tests.support.tables import MakeTable


def test_the_mark_of_a_job_that_committed_and_ended_after_the_versions_were_read_stays(make_table: MakeTable) -> None:
    """Found by the model of events: its own finish may be given up, and then nothing announces its commit."""
    table = make_table(10)
    table.add_columns({"y": double})
    before = table.lance
    result = table.backfill("y", runner="inline")
    checkpoints, outbox = table.location.checkpoints, f"field-{before.lance_schema.field('y').id()}"
    mark = OutboxEntry(result.job_id, int(before.version))
    write_outbox(checkpoints, outbox, mark)
    spec = SimpleNamespace(of_view=True, outbox=outbox, job_id="20200101T000000-another")
    location = SimpleNamespace(checkpoints=checkpoints, open=lambda: before, uri=table.location.uri)
    assert find_unannounced(SimpleNamespace(spec=spec, location=location), lambda *_: None) is None  # type: ignore[arg-type]
    assert read_outbox(checkpoints, outbox) == [mark]
    now = SimpleNamespace(spec=spec, location=table.location)
    found = find_unannounced(now, lambda *_: None)  # type: ignore[arg-type]
    assert found is not None
    assert (found.from_version, found.to_version) == (before.version, result.version)
    assert find_unannounced(now, lambda *_: result.version) is None  # type: ignore[arg-type]
    assert read_outbox(checkpoints, outbox) == []
