"""The reference has everything that users import, and every command."""

from __future__ import annotations

import ast
import re
import runpy
from dataclasses import fields
from pathlib import Path

import griffe
import pytest

import airflow_geneva
from airflow_geneva.engine import choices
from airflow_geneva.engine.plan.sizing import Sizing
from airflow_geneva.get_provider_info import get_provider_info

ROOT = Path(__file__).parents[2]
REFERENCE = {page.stem: page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")}


def exported(package: str) -> list[str]:
    tree = ast.parse((ROOT / "airflow_geneva" / package / "__init__.py").read_text())
    [names] = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and is_all(node)]
    return list(names)


def is_all(node: ast.Assign) -> bool:
    return isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"


def described(*pages: str) -> set[str]:
    texts = (REFERENCE[page] for page in pages)
    return {path.rpartition(".")[2] for text in texts for path in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}


def test_everything_the_package_exports_is_described() -> None:
    # The page on errors describes its whole module.
    assert set(airflow_geneva.__all__) - {"BatchFailed", "GenevaError", "UdfCrashed"} <= described(*REFERENCE)
    assert set(exported("functions")) <= described("ready-made-functions")
    assert "errors" in described("errors")


@pytest.mark.parametrize("package", ["operators", "sensors", "task_groups", "triggers"])
def test_everything_for_airflow_is_described(package: str) -> None:
    assert set(exported(package)) <= described("airflow")


def test_every_command_is_described_with_its_options() -> None:
    site = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))
    page = site["on_page_markdown"](REFERENCE["command-line"])
    assert "<!--" not in page
    described = set(re.findall(r"^## airflow-geneva (.*)$", page, re.MULTILINE))
    assert described >= {
        "define",
        "plan",
        "backfill",
        "refresh",
        "copy",
        "jobs",
        "status",
        "errors",
        "doctor",
        "checkpoints list",
        "checkpoints gc",
    }
    assert "| `--ttl` | Remove only what is older than this: 7d, 12h or 30m. Default: `7d`. |" in page
    assert "| `DB JOB` | The database and the job's id. |" in page


def test_what_classes_share_is_described_with_each_of_them() -> None:
    site = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))
    extensions = griffe.Extensions(site["PlainDocstrings"]())
    package = griffe.load("airflow_geneva", extensions=extensions, search_paths=[ROOT])
    sizes = {field.name for field in fields(Sizing)} - {"task_memory_bytes", "price_per_slot_hour"}
    for path in re.findall(r"^::: airflow_geneva\.(.*(?:Group|Operator))$", REFERENCE["airflow"], re.MULTILINE):
        shown = package[path]
        parameters = [parameter.name for parameter in shown.parameters if parameter.name not in ("self", "kwargs")]
        described = re.findall(r"^    (\w+): ", shown.docstring.value, re.MULTILINE)
        assert sorted(parameters) == sorted(set(described) - {"kwargs"}), path
        assert len(described) == len(set(described))
        if "Backfill" in path:
            assert sizes <= set(parameters)
            assert shown.parameters["checkpoint_interval"].default == "10.0"
        elif "Refresh" in path and "Database" not in path:
            assert sizes - {"commit_granularity"} <= set(parameters)


def test_every_option_of_airflows_configuration_is_described_with_its_default() -> None:
    site = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))
    page = site["on_page_markdown"](REFERENCE["airflow"])
    assert "<!--" not in page
    [options] = [section["options"] for section in get_provider_info()["config"].values()]
    for name, option in options.items():
        [row] = re.findall(rf"^\| `{name}` \| (.*) \|$", page, re.MULTILINE)
        default = f"`{option['default']}`" if option["default"] else "none"
        assert row.endswith(f"| {default} | `AIRFLOW__GENEVA__{name.upper()}`")
    assert "``" not in page.split("## Task groups")[0]


def test_what_the_guides_import_of_assets_is_described() -> None:
    guides = [page.read_text() for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "reference"]
    imported = ",".join(
        found for text in guides for found in re.findall(r"from airflow_geneva\.assets import (.*)", text)
    )
    members = re.findall(r"^::: airflow_geneva\.assets\n.*?members: \[(.*?)\]", REFERENCE["airflow"], re.M | re.S)
    names = {name.strip() for name in imported.split(",")}
    assert names <= {name.strip() for name in members[0].split(",")}
    assert "one_run_per_batch" in names


def test_each_word_of_a_choice_is_explained() -> None:
    chosen = [one for one in vars(choices).values() if isinstance(one, type) and issubclass(one, choices.Choice)]
    lacking = {f"{one.__name__}.{word}" for one in chosen for word in one.words() if f"{word}: " not in one.explained()}
    assert len(chosen) > 5
    assert lacking == set()
