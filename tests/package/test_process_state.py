"""What lives as long as a process: each such value is listed here, under why no job, table or store can own it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import airflow_geneva
from airflow_geneva.engine.process_memo import ProcessMemo

PACKAGE = Path(airflow_geneva.__file__).parent

# Classes of the standard library; those of the package are found by `changing_classes`.
STATE = {
    *("dict", "list", "set", "defaultdict", "OrderedDict", "deque", "Counter", "WeakKeyDictionary", "WeakSet"),
    *("WeakValueDictionary", "Lock", "RLock", "Condition", "Event", "Semaphore", "local", "ContextVar", "count"),
    *("ThreadPoolExecutor", "TemporaryDirectory"),
}
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}

PERMITTED = {
    "Files and versions do not change, nor does code: what was read of them once, all jobs of the process use": (
        "engine.apply.udf_call._FORMATTED",
        "engine.checkpoint.packs._LOADED",
        "engine.checkpoint.packs._read_keys",
        "engine.code_hash.syntax._parse",
        "engine.counts.Sums._parts",
        "engine.duplicates.vectors._directions",
        "engine.lance_io.arrays._reason_against_type",
        "engine.lance_io.plain_values._exactly",
        "engine.lance_io.table_versions._stamp_of",
        "engine.lance_io.to_arrow._rule",
        "engine.load.iceberg.open_iceberg",
        "engine.masking._forms",
        "engine.storage.documents._fields",
        "engine.views.definition.ViewDefinition.from_json",
        "engine.views.state._FOUND",
        "pages.graph._place",
        "pages.rendering.environment",
        "pages.rendering.static_version",
        "spark.code.package_zip",
    ),
    "Two requests of a page, or two calls of a notebook, share no object but the process": (
        "engine.job.error_records._COUNTED",
        "engine.udf.of_process._columns",
        "engine.udf.of_process._given",
        "engine.views.sources._created",
        "pages.access._find_dags",
        "pages.access._find_databases",
        "pages.access._find_writers",
        "pages.databases._CARDS",
        "pages.tables._COUNTS",
        "pages.tables._KNOWN",
        "pages.tables._OLD_COUNTS",
    ),
    "One client, session or budget of a service or a store serves all jobs": (
        "engine.lance_io.table_versions._KEPT",
        "engine.limits.limiter._limiters",
        "engine.storage.catalogs._clients",
        "engine.storage.catalogs._described",
        "engine.storage.files._session",
        "engine.storage.location._session",
        "engine.storage.outages._outages",
        "engine.storage.requests._UNTAKEN",
        "engine.storage.requests.count_requests",
        "spark.code._sent",
    ),
    "Processes, threads and the event loop serve all jobs, and end with the process": (
        "engine.apply.event_loop.LOOP",
        "engine.apply.event_loop._here",
        "engine.apply.isolation.process.POOL",
        "engine.lance_io.staged_files._AHEAD",
        "engine.run.background._running",
        "engine.run.prepare._BEHIND",
        "pages.own_threads._THREADS",
        "pages.readers.READING",
        "spark.local._java_folders",
        "triggers.new_fragments._THREADS",
    ),
    "It is about the memory, the modules or the death of this very process": (
        "engine.apply.fitting._learned",
        "engine.checkpoint.submissions._underway",
        "engine.faults._hits",
        "engine.lance_io.task_memory.return_large_buffers",
        "engine.udf.code_archive.unused",
        "engine.udf.decorator._instances",
        "spark.shuffle._sender_of_stage",
        "spark.tasks._claims_of_stage",
        "spark.tasks._groups_of_stage",
        "spark.tasks._target_of_stage",
    ),
    "A log line or an error may repeat any secret that the process has seen": (
        "engine.masking._environment",
        "engine.masking._masking",
        "engine.masking._secrets",
        "engine.storage.secrets.remember_options",
    ),
    "It guards one of these, or what a library shares between all threads": (
        "engine.checkpoint.packs._LOADING",
        "functions.pdf._pdfium",
        "spark.local._starting",
    ),
    "It holds within a `with` block only, for calls through code of users or of libraries": (
        "cli.stopping._ASKED",
        "cli.words.OPTIONS",
        "engine.job.meter._current",
        "engine.lance_io.conflicts._retries",
        "engine.limits.calls._table",
        "engine.limits.rate_limit._meter",
        "engine.udf.stored._makers",
        "functions.answers._most",
    ),
}


def test_what_lives_as_long_as_the_process_is_listed_with_the_reason() -> None:
    """A value that a job, a table, a database or a store can own is an attribute of that."""
    trees = {name_of(file): ast.parse(file.read_text(encoding="utf-8")) for file in sorted(PACKAGE.rglob("*.py"))}
    state = STATE | {name for tree in trees.values() for name in changing_classes(tree)}
    found = {f"{module}.{name}" for module, tree in trees.items() for name in find_state(tree, state)}
    listed = [name for names in PERMITTED.values() for name in names]
    assert sorted(found - {*listed}) == [], "let a job, a table or a store own it, or list it with the reason"
    assert sorted({*listed} - found) == [], "it is gone: remove it from the list"
    assert len(listed) == len({*listed})


def test_a_memo_returns_what_was_made_even_if_another_thread_removes_it_at_once() -> None:
    memo = ProcessMemo[str, int](most=0)
    assert [memo.once("k", lambda: 1), memo.once("k", lambda: 2), len(memo)] == [1, 2, 0]


def test_state_is_found_in_every_form() -> None:
    text = """
TABLE = {1: 2}
SEEN = {}
KNOWN: dict[str, int] = dict()
FILLED = [1]
POOL = Pool()
GOLD = Price(1)
LOCK = threading.Lock()
LOCKS = [threading.Lock() for _ in range(3)]
parse = functools.lru_cache(maxsize=1)(read)
hits = 0
class Pool: ...
@dataclass(frozen=True)
class Price:
    @classmethod
    @cache
    def of(cls): ...
@lru_cache(maxsize=3)
def read(): FILLED.append(2)
def hit():
    global hits
    @cache
    def inner(): ...
"""
    tree = ast.parse(text)
    found = ["SEEN", "KNOWN", "FILLED", "POOL", "LOCK", "LOCKS", "parse", "Price.of", "read", "hits"]
    assert sorted(find_state(tree, STATE | changing_classes(tree))) == sorted(found)


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


def changing_classes(tree: ast.Module) -> set[str]:
    """Return the classes of a module whose objects may change."""
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and "frozen=True" not in "".join(map(ast.unparse, node.decorator_list))
        and not {"Enum", "NamedTuple", "Protocol"} & {ast.unparse(base) for base in node.bases}
    }


def find_state(tree: ast.Module, state: set[str]) -> Iterator[str]:
    changed = set(changed_names(tree))
    for node in tree.body:
        for name, value in assigned(node):
            if name in changed or is_state(value, state):
                yield name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for name in cached_functions(node))
    yield from cached_functions(tree)


def assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
        yield node.target.id, node.value


def is_state(value: ast.expr, state: set[str]) -> bool:
    if isinstance(value, (ast.Dict, ast.List)):
        return not ast.unparse(value).strip("{}[]")
    if isinstance(value, ast.ListComp):
        return is_state(value.elt, state)
    if not isinstance(value, ast.Call):
        return False
    called = ast.unparse(value.func).partition("(")[0].rpartition(".")[2]
    return called in state | {"cache", "lru_cache"}


def cached_functions(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    for function in node.body:
        if isinstance(function, ast.FunctionDef) and any(
            ast.unparse(decorator).partition("(")[0].rpartition(".")[2] in ("cache", "lru_cache")
            for decorator in function.decorator_list
        ):
            yield function.name


def changed_names(tree: ast.Module) -> Iterator[str]:
    """Yield names that a module rebinds inside functions, or whose values it changes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            yield node.value.id
        if isinstance(node, ast.Attribute) and node.attr in CHANGES and isinstance(node.value, ast.Name):
            yield node.value.id
