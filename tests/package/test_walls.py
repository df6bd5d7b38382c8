"""The walls between the rooms of the package, as imports."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

import airflow_geneva
from airflow_geneva.engine import api

PACKAGE = Path(airflow_geneva.__file__).parent
NAME = "airflow_geneva"
TESTS = Path(__file__).parents[1]

# A room may import the ground, whose modules are ordered as well, and the rooms before it, for types too.
ROOMS = (
    "storage",
    "lance_io",
    "code_hash",
    "limits",
    "udf",
    "checkpoint",
    "job",
    "views",
    "duplicates",
    "plan",
    "apply",
    "write",
    "commit",
    "cleanup",
    "watch",
    "load",
    "run",
    "spark",
)
FLOORS = {"engine"}
HOUSE = ("engine", "spark", "nouns", "functions", "Airflow", "cli")
GROUND = (
    "runtime",
    "faults",
    "process_memo",
    "masking",
    "display",
    "failures",
    "counts",
    "results",
    "errors",
    "choices",
)
NOUNS = {"database", "database_plan", "table", "query", "view", "namespace"}
AIRFLOW_SIDE = {"operators", "sensors", "triggers", "hooks", "links", "pages", "task_groups", "plugin", "assets"}
ENTRANCES = {"cli", "functions", "get_provider_info", "testing"}
MOST_AT_THE_ROOT = 25
VALUES = {"pyarrow", "lance", "numpy", "pandas"}
ON_EXECUTORS = {"pyarrow", "lance", "lance_namespace", "cloudpickle", "numpy"}  # the third comes with the second
STANDARD_LIBRARY = sys.stdlib_module_names | {"annotationlib", "tomllib"}  # these two came after Python 3.10
LONG_LINES = 900

When = Literal["on import", "inside a function", "for types only"]


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    when: When
    line: int

    def __str__(self) -> str:
        return f"{self.importer} line {self.line} imports {self.imported} {self.when}"


@dataclass(frozen=True)
class Module:
    """A module of the package; `place` is its first part below the package, or below its floor: a room, or itself."""

    name: str
    file: Path

    @property
    def place(self) -> str:
        return place_of(self.name)

    @property
    def package(self) -> str:
        return self.name if self.file.name == "__init__.py" else self.name.rpartition(".")[0]


def place_of(name: str) -> str:
    parts = [part for part in name.split(".")[1:] if part not in FLOORS]
    return parts[0] if parts else ""


def list_modules() -> list[Module]:
    modules = []
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = [NAME, *file.relative_to(PACKAGE).with_suffix("").parts]
        modules.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), file))
    return modules


MODULES = list_modules()
NAMES = {module.name for module in MODULES}


DOOR = f"{NAME}.engine.api"


def exported_from(name: str, base: str = NAME) -> str:
    return {NAME: airflow_geneva, DOOR: api}[base]._LAZY_EXPORTS.get(name, base)


def read_imports(module: Module) -> Iterator[Import]:
    yield from walk(ast.parse(module.file.read_text(encoding="utf-8")), module, "on import")


def walk(node: ast.AST, module: Module, when: When) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(module.name, alias.name, when, node.lineno)
    elif isinstance(node, ast.ImportFrom):
        for target in targets_of(node, module):
            yield Import(module.name, target, when, node.lineno)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        yield from walk_all(node.body, module, "for types only")
        yield from walk_all(node.orelse, module, when)
    else:
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        deeper: When = "inside a function" if inside and when == "on import" else when
        yield from walk_all(ast.iter_child_nodes(node), module, deeper)


def walk_all(nodes: Iterable[ast.AST], module: Module, when: When) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):  # no expression imports
            yield from walk(node, module, when)


def targets_of(node: ast.ImportFrom, module: Module) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        above = module.package.split(".")
        base = ".".join([*above[: len(above) - node.level + 1], *([base] if base else [])])
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        if base == NAME:
            # `from airflow_geneva import Table` leads into table.py all the same.
            home = exported_from(alias.name)
            yield inner if home == NAME and inner in NAMES else home
        else:
            yield inner if inner in NAMES else base
            if base == DOOR:
                yield exported_from(alias.name, base)


@cache
def imports() -> list[Import]:
    return [found for module in MODULES for found in read_imports(module)]


@cache
def within() -> list[Import]:
    """Return the package's imports of itself."""
    # What comes through the door is loaded from its home, which the importer does not know.
    door = {(found.importer, found.line) for found in imports() if found.imported == DOOR}
    return [
        found
        for found in imports()
        if found.imported.partition(".")[0] == NAME
        and (found.imported == DOOR or (found.importer, found.line) not in door)
    ]


def outside(found: Import) -> str | None:
    """The third-party distribution's top module an import leads to, None for the package and the standard library."""
    top = found.imported.partition(".")[0]
    return None if top == NAME or top in STANDARD_LIBRARY else top


def complain(imports: list[Import]) -> str:
    return "\n".join(map(str, imports))


def test_every_folder_of_the_package_is_a_room_of_the_design() -> None:
    places = [PACKAGE, *(PACKAGE / floor for floor in sorted(FLOORS))]
    folders = {folder.name for place in places for folder in place.iterdir() if any(folder.rglob("*.py"))}
    assert folders <= {*ROOMS, *AIRFLOW_SIDE, *ENTRANCES, *FLOORS}


def test_the_root_keeps_what_users_import_and_airflow_finds_by_name() -> None:
    entries = {entry.name for entry in PACKAGE.iterdir() if entry.name != "__pycache__"}
    folders = {*FLOORS, "spark", *AIRFLOW_SIDE, *ENTRANCES} - {"assets", "plugin", "get_provider_info", "testing"}
    modules = {"__init__", "errors", *NOUNS, "assets", "bar", "plugin", "get_provider_info", "testing"}
    assert entries == {"py.typed", *(f"{name}.py" for name in modules), *folders}
    assert len(entries) <= MOST_AT_THE_ROOT


def floor_of(module: str) -> str:
    """Return the floor of a module, or which of the entrances to the house it belongs to."""
    first = module.removeprefix(f"{NAME}.").partition(".")[0]
    if first in (*FLOORS, "spark"):
        return first
    return "Airflow" if first in AIRFLOW_SIDE else "nouns" if first in NOUNS else first


def draw_imports(names: Sequence[str], of: Callable[[str], str]) -> str:
    """Draw what imports what: a row each, with a dot where it imports what has the column's number."""
    width = max(map(len, names))
    rows = [" " * (width + 4) + " ".join(f"{number:2}" for number in range(1, len(names) + 1))]
    for number, importer in enumerate(names, 1):
        found = {of(found.imported) for found in within() if of(found.importer) == importer}
        dots = " ".join(" ●" if name in found and name != importer else " ·" for name in names[:number])
        above = " ".join(" ○" if name in found else "  " for name in names[number:])
        rows.append(f"{number:2}  {importer:{width}}{dots} {above}".rstrip())
    return "\n".join(rows)


@pytest.mark.parametrize(("names", "of"), [(HOUSE, floor_of), (ROOMS, place_of)], ids=["floors", "rooms"])
def test_the_pictures_of_the_imports_are_the_drawn_ones(names: Sequence[str], of: Callable[[str], str]) -> None:
    picture = draw_imports(names, of)
    assert f"```text\n{picture}\n```" in (PACKAGE.parent / "docs" / "architecture.md").read_text(), picture


@pytest.mark.parametrize("room", [*GROUND, *ROOMS])
def test_a_room_imports_only_the_ground_and_the_rooms_before_it(room: str) -> None:
    order = (*GROUND, *ROOMS)
    before = order[: order.index(room) + 1]
    wrong = [
        found
        for found in within()
        if place_of(found.importer) == room
        and place_of(found.imported) not in before
        # The package itself holds no more than its version, and a floor nothing.
        and place_of(found.imported)
    ]
    assert not wrong, complain(wrong)


def largest_circle(imports: Iterable[Import]) -> list[str]:
    """Return the most modules of which each leads to each other by these imports."""
    leads = {name: {found.imported for found in imports if found.importer == name} & NAMES - {name} for name in NAMES}
    reached = {name: reach(name, leads) for name in NAMES}
    circles = ([other for other in reached[name] if name in reached[other]] for name in NAMES)
    return sorted(max(circles, key=len))


def reach(name: str, leads: dict[str, set[str]]) -> set[str]:
    found, ahead = set[str](), [name]
    while ahead:
        news = leads[ahead.pop()] - found
        found |= news
        ahead += news
    return found


def test_no_circle_of_imports_has_more_than_three_modules_with_those_for_types() -> None:
    assert not largest_circle([found for found in within() if found.when == "on import"])
    circle = largest_circle([found for found in within() if found.when != "inside a function"])
    assert len(circle) <= 3, circle


def test_nouns_airflow_and_the_command_know_the_door_of_the_engine_where_files_lie_and_what_a_function_is() -> None:
    wrong = [
        found
        for found in within()
        if place_of(found.importer) in {*NOUNS, *AIRFLOW_SIDE, "bar", "cli"}
        and floor_of(found.imported) == "engine"
        and place_of(found.imported) not in {"api", "storage", "udf", *GROUND}
    ]
    assert not wrong, complain(wrong)


def test_the_door_hands_on_each_value_for_types_too() -> None:
    body = next(
        node for node in ast.parse(Path(api.__file__).read_text(encoding="utf-8")).body if isinstance(node, ast.If)
    )
    for_types = {found.imported for found in walk(body, Module(DOOR, Path(api.__file__)), "on import")}
    assert {f"{NAME}.engine.storage.location", "lance"} | set(api._LAZY_EXPORTS.values()) == for_types


def test_the_door_has_no_name_that_nobody_outside_uses() -> None:
    outside = [module.file for module in MODULES if floor_of(module.name) not in {*FLOORS, "spark"}]
    words = {word for file in outside for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    assert not api._LAZY_EXPORTS.keys() - words


def test_nouns_load_the_steps_of_a_job_when_they_take_one() -> None:
    loaded = [
        found
        for found in imports()
        if place_of(found.imported) == "run" and place_of(found.importer) in NOUNS and found.when == "on import"
    ]
    assert not loaded, complain(loaded)


def test_nothing_points_back_at_the_airflow_side() -> None:
    wrong = [
        found
        for found in within()
        if place_of(found.imported) in AIRFLOW_SIDE
        and place_of(found.importer) not in AIRFLOW_SIDE
        # `--conn-id` names an Airflow connection; without it, the command needs no Airflow.
        and not (place_of(found.importer) == "cli" and found.when == "inside a function")
    ]
    assert not wrong, complain(wrong)


def test_only_the_airflow_side_imports_airflow() -> None:
    wrong = [
        found for found in imports() if outside(found) == "airflow" and place_of(found.importer) not in AIRFLOW_SIDE
    ]
    assert not wrong, complain(wrong)


def test_what_is_private_in_airflow_is_imported_in_one_module() -> None:
    private = re.compile(r"airflow\.(_shared|api_fastapi|models|utils|sdk\._shared|sdk\.execution_time)\b")
    home = f"{NAME}.operators._airflow_internals"
    wrong = [found for found in imports() if private.match(found.imported) and found.importer != home]
    assert not wrong, complain(wrong)
    assert any(private.match(found.imported) for found in imports())


def test_threads_queues_time_chance_and_ids_come_from_one_module() -> None:
    """A simulation replaces that module; what shows pages, bars and messages takes no part in the protocol."""
    elsewhere = {
        "pages",
        "cli",
        "functions",
        "triggers",
        "bar",
        "testing",
        "code_hash",
    }  # the last is about values of such types
    steered = {"threading", "_thread", "concurrent", "queue", "time", "uuid", "random", "secrets"}
    wrong = [
        found
        for found in imports()
        if found.imported.partition(".")[0] in steered and place_of(found.importer) not in {"runtime", *elsewhere}
    ]
    assert not wrong, complain(wrong)
    now = [
        module.name
        for module in MODULES
        if module.place not in {*elsewhere, "sensors"} and "datetime.now(" in module.file.read_text(encoding="utf-8")
    ]
    assert now == []
    assert {found.imported for found in imports() if found.importer == f"{NAME}.engine.runtime"} >= {
        "threading",
        "time",
    }


def test_only_spark_imports_pyspark() -> None:
    wrong = [
        found for found in imports() if outside(found) in ("pyspark", "py4j") and place_of(found.importer) != "spark"
    ]
    assert not wrong, complain(wrong)


def test_what_runs_on_executors_needs_arrow_lance_and_cloudpickle_only() -> None:
    wrong = [
        found
        for found in imports()
        if place_of(found.importer) in {*GROUND, *ROOMS}
        # Executors get joined rows; pyiceberg, where a table of Iceberg is loaded from; and packaging, where the
        # requirements of a function name versions, which the message about its absence says.
        and found.importer not in {f"{NAME}.engine.{one}" for one in ("load.join", "load.iceberg", "udf.packages")}
        and outside(found) not in ON_EXECUTORS | {None, "pyspark", "py4j"}
        and found.when != "for types only"
    ]
    assert not wrong, complain(wrong)


@pytest.mark.parametrize("start", [NAME, f"{NAME}.get_provider_info"])
def test_importing_the_package_leads_to_the_standard_library_only(start: str) -> None:
    foreign = [found for found in loaded_by(start) if outside(found) is not None]
    assert not foreign, complain(foreign)


def test_what_dag_files_import_leads_to_no_values() -> None:
    """The dag processor imports each DAG file in a fresh process, which Lance, Arrow and NumPy cost a second of CPU."""
    # Private modules are loaded by public ones, or by the command.
    public = [module.name for module in MODULES if "._" not in module.name and module.place in AIRFLOW_SIDE - {"pages"}]
    wrong = {f"{name}: {found}" for name in public for found in loaded_by(name) if outside(found) in VALUES}
    assert not wrong, "\n".join(sorted(wrong))


def loaded_by(name: str) -> Iterator[Import]:
    """All imports that importing a module runs, those of the packages around it included."""
    seen: set[str] = set()
    ahead = [name]
    while ahead:
        name = ahead.pop()
        if name not in seen and name in NAMES:
            seen.add(name)
            ahead.append(name.rpartition(".")[0])
            for found in imports():
                if found.importer == name and found.when == "on import":
                    yield found
                    ahead.append(found.imported)


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "util", "common", "_common", "helpers", "misc"}
    assert [module.name for module in MODULES if module.name.rpartition(".")[2] in drawers] == []


def test_long_modules_are_pointed_out() -> None:
    """The subject cuts, not a number: a warning asks whether it is still one."""
    lines = {module.name: len(module.file.read_text(encoding="utf-8").splitlines()) for module in MODULES}
    for name, count in lines.items():
        if count > LONG_LINES:
            warnings.warn(f"{name} has {count} lines: is it one subject?", stacklevel=1)


def test_no_test_imports_a_test() -> None:
    """What two tests use lies in `tests/support`."""
    wrong = []
    for file in sorted(TESTS.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        # To parse them all takes seconds, and few have a line that looks like it.
        for node in ast.walk(ast.parse(text)) if re.search(r"import.*\btest_|from.*\btest_", text) else ():
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module or ''}.{name}" for name in names]
            wrong += [f"{file} imports {name}" for name in names if re.search(r"(^|\.)test_\w+(\.|$)", name)]
    assert wrong == []


def test_the_walls_see_every_way_to_import() -> None:
    """The reader of imports itself, on a module that climbs every wall."""
    text = """
import lance.dataset
from airflow_geneva import Table
from ..run import session
if TYPE_CHECKING:
    import pyspark
def f():
    def g():
        from .. import udf, plan
try:
    import airflow
except ImportError:
    pass
"""
    module = Module(f"{NAME}.engine.plan.example", PACKAGE / "engine" / "plan" / "example.py")
    seen = {(found.imported, found.when) for found in walk(ast.parse(text), module, "on import")}
    assert {
        ("lance.dataset", "on import"),
        (f"{NAME}.table", "on import"),
        ("pyspark", "for types only"),
        (f"{NAME}.engine.udf", "inside a function"),
        ("airflow", "on import"),
    } <= seen
    assert any(place_of(name) == "run" for name, _ in seen)
