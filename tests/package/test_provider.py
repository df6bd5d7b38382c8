from __future__ import annotations

import json
from importlib import import_module, metadata
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

import airflow_geneva
from airflow_geneva.get_provider_info import get_provider_info

PACKAGE = Path(airflow_geneva.__file__).parent


def modules_of(folder: str) -> set[str]:
    return {f"airflow_geneva.{folder}.{file.stem}" for file in (PACKAGE / folder).glob("*.py") if file.stem[0] != "_"}


def test_airflow_finds_the_description_through_the_entry_point() -> None:
    entries = metadata.entry_points(group="apache_airflow_provider")
    loaders = [entry.load() for entry in entries if entry.value.startswith("airflow_geneva.")]
    assert loaders == [get_provider_info]


def test_the_description_is_plain_json() -> None:
    assert json.loads(json.dumps(get_provider_info())) == get_provider_info()


@pytest.mark.airflow
@pytest.mark.parametrize("schema", ["provider_info.schema.json", "provider.yaml.schema.json"])
def test_the_description_has_the_form_airflow_asks_for(schema: str) -> None:
    definition = json.loads(files("airflow").joinpath(schema).read_text())
    if schema == "provider.yaml.schema.json":
        # Of the longer schema only the parts that a description shares with it apply: it also asks for changelogs.
        shared = set(get_provider_info()) & set(definition["properties"])
        definition["properties"] = {name: definition["properties"][name] for name in shared}
        definition["required"] = []
    jsonschema.validate(get_provider_info(), definition)
    if schema == "provider_info.schema.json":
        # Airflow overlooks a key that it does not know.
        assert set(get_provider_info()) <= set(definition["properties"])


@pytest.mark.parametrize("kind", ["operators", "hooks", "sensors", "triggers"])
def test_every_airflow_module_is_listed(kind: str) -> None:
    listed = {module for entry in get_provider_info().get(kind, []) for module in entry["python-modules"]}
    assert modules_of(kind) <= listed


def test_the_connection_form_shows_the_database_and_its_storage_options_only() -> None:
    [connection] = get_provider_info()["connection-types"]
    behaviour = connection["ui-field-behaviour"]
    assert connection["connection-type"] == "lance"
    assert connection["hook-class-name"] == "airflow_geneva.hooks.lance.LanceHook"
    assert behaviour["relabeling"] == {"host": "Database URI"}
    assert set(behaviour["hidden-fields"]) == {"schema", "login", "password", "port", "extra"}
    assert set(connection["conn-fields"]) == {"storage_options", "allowed_places", "namespace"}


@pytest.mark.core
@pytest.mark.airflow
def test_links_and_plugins_are_listed_and_can_be_imported() -> None:
    info = get_provider_info()
    [plugin] = info["plugins"]
    for path in (*info["extra-links"], plugin["plugin-class"]):
        module, _, name = path.rpartition(".")
        assert getattr(import_module(module), name).name
    entries = metadata.entry_points(group="airflow.plugins")
    values = [entry.value for entry in entries if entry.value.startswith("airflow_geneva.")]
    assert values == [plugin["plugin-class"].replace(".GenevaPlugin", ":GenevaPlugin")]
