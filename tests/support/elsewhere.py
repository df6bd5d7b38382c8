"""Tables that name files which lie elsewhere, as anyone can write them who may write the table's folder."""

from __future__ import annotations

import json

import lance

from airflow_geneva import Table


def point_elsewhere(table: Table, other: Table, base: str | None = None) -> None:
    """Commit a version whose rows lie in another database, as anyone can who may write the table's folder."""
    named = lance.DatasetBasePath(base or other.uri, name="elsewhere", is_dataset_root=True)
    dataset = lance.dataset(table.uri).add_bases([named])
    (number,) = dataset.base_paths()
    fragments = []
    for fragment in other.lance.get_fragments():
        made = fragment.metadata.to_json()
        for file in made["files"]:
            file["base_id"] = number
        fragments.append(lance.FragmentMetadata.from_json(json.dumps(made)))
    operation = lance.LanceOperation.Overwrite(other.lance.schema, fragments)
    lance.LanceDataset.commit(table.uri, operation, read_version=dataset.version)
