"""Defects of the protocol that worlds must find: the package with one guard removed or one order turned around.

``python -m tests.simulation --mutant NAME --seeds 2000`` runs worlds with one, until the first that goes wrong.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.guards import GUARDS, Guard

PACKAGE = Path(__file__).parents[2] / "airflow_geneva"


@dataclass(frozen=True)
class Mutant:
    """A defect, and the scenario in which it shows itself; "" for all of them."""

    name: str
    guard: Guard
    scenario: str = ""

    @property
    def found_by(self) -> int | None:
        """A seed of its scenario that has found it; None: a few dozen seeds have not."""
        return _FOUND_BY.get(self.name)


_FOUND_BY = {
    "cleanup-trusts-its-list-of-versions": 2,
    "deleted-rows-count": 4,
    "facts-after-the-commit": 4,
    "fold-drops-the-newer": 8,
    "inputs-not-verified": 0,
    "intents-not-read": 1,
    "key-changed-in-a-load": 0,
    "landed-swap-forgotten": 231,
    "lease-without-fencing": 14,
    "lost-files-not-looked-for": 16,
    "metadata-of-others-lost": 8,
    "no-intent": 1,
    "no-look-after-the-commit": 17,
    "no-snapshot-before-the-swap": 0,
    "no-verify-after-a-conflict": 43,
    "no-stale-facts": 17,
    "once-compaction-in-a-run": 1,
    "once-facts-of-a-later-version-dropped": 106,
    "once-moved-from-a-job-that-died": 94,
    "once-moved-in-a-job-then-cleaned": 21,
    "once-moved-rows-of-two-commits": 74,
    "once-vacuum-in-a-commit": 14,
    "one-ledger-a-job": 0,
    "only-what-came-after-the-swap": 25,
    "open-commits-not-asked": 298,
    "own-swap-not-known": 58,
    "reader-does-not-list-again": 14,
    "swap-on-another-base": 1,
    "swaps-share-no-fragment": 13,
    "unchanged-rows-run-again": 1,
    "values-of-old-inputs-follow": 2,
    "watermark-before-the-swap": 0,
}


def mutant(name: str, why: str, code: str, without: str, scenario: str = "") -> Mutant:
    return Mutant(name, Guard(why, code, without, ()), scenario)


def guarded(name: str, why: str, scenario: str = "") -> Mutant:
    """Name a guard of `make mutants`, by the beginning of its reason."""
    (guard,) = (guard for guard in GUARDS if guard.why.startswith(why))
    return Mutant(name, guard, scenario)


MUTANTS: tuple[Mutant, ...] = (
    # The commit of a column.
    guarded("inputs-not-verified", "Values of inputs that another writer replaced in place would", "replaced"),
    guarded("no-look-after-the-commit", "Inputs that were replaced between the check and the commit", "replaced"),
    mutant(
        "no-verify-after-a-conflict",
        "Files that were verified at one version are committed on the next one, whatever came in between.",
        "                read_version=dataset.version,\n                operation=replace_columns(dataset, files),",
        "                read_version=self.location.open().version,\n"
        "                operation=replace_columns(dataset, files),",
        "crossed",
    ),
    mutant(
        "facts-after-the-commit",
        "A kill between them leaves values that no fact is about.",
        "                first=partial(self._learn, self._facts(verdict)),\n"
        "                then=lambda committed: self.data.look_again(committed, names),",
        "                then=lambda committed: (\n"
        "                    self._learn(self._facts(verdict)), self.data.look_again(committed, names)\n"
        "                ),",
        "column",
    ),
    mutant(
        "no-stale-facts",
        "Values of inputs that were replaced during the commit would stop the next run as values of nobody.",
        "return [Fact(files.signature, STALE, None, at, None, self._inputs_text) for files in ours]",
        "return [] if at or ours else []",
        "replaced",
    ),
    guarded("open-commits-not-asked", "Values that a job committed right before it was killed", "replaced"),
    guarded("lost-files-not-looked-for", "Rows whose data file was removed during the last commit", "vacuumed"),
    guarded("deleted-rows-count", "Rows that were deleted between plan and commit would count", "column"),
    guarded("values-of-old-inputs-follow", "Rows whose inputs an update changed during the run would", "column"),
    # Ledgers.
    mutant(
        "one-ledger-a-job",
        "The second ledger of a job would replace its first one, with the facts about earlier commits.",
        'store[f"ledger.{job_id}.{uuid.uuid4().hex[:12]}"]',
        'store[f"ledger.{job_id}.0"]',
        "column",
    ),
    guarded("fold-drops-the-newer", "Facts of ledgers that cannot be read now would be lost", "folds"),
    guarded("reader-does-not-list-again", "A reader whose ledgers were folded and removed", "listed"),
    # The cleanup.
    guarded("cleanup-trusts-its-list-of-versions", "A file that was committed while garbage is removed", "died"),
    # The swap of a view.
    guarded("swap-on-another-base", "A refresh would put rows into a view that another refresh or writer", "view"),
    guarded("swaps-share-no-fragment", "Two refreshes at once would both add their rows: Lance commits", "view"),
    guarded("own-swap-not-known", "A swap that an earlier try committed would be told as lost", "view"),
    guarded("no-intent", "A swap would leave no record of what it is about to do", "tidied"),
    guarded("intents-not-read", "The schema metadata would be believed although a later swap", "tidied"),
    guarded("landed-swap-forgotten", "A swap that landed and was answered with a conflict would be", "tidied-far"),
    guarded("only-what-came-after-the-swap", "What others did between the planned version and the swap", "copied"),
    mutant(
        "watermark-before-the-swap",
        "A kill between them leaves a note that the view shows a version of its source that it does not show.",
        "        begun, loose = set[str](), list[int]()\n",
        "        begun, loose = set[str](), list[int]()\n"
        "        save_snapshot(location.checkpoints, key, content)\n"
        "        write_advance_note(location, AdvanceNote(swap.based_on, spec.version, key))\n",
        "view",
    ),
    mutant(
        "no-snapshot-before-the-swap",
        "A swap names a snapshot that does not exist, so each refresh would write all rows again.",
        "partial(_announce, location, key, None if saved else content, begun, loose)",
        "partial(_announce, location, key, None, begun, loose)",
        "view",
    ),
    mutant(
        "unchanged-rows-run-again",
        "Rows would run again when another row of their fragment changes.",
        "known = computed_rows.resolve(files, live) if parents or ids & seen() else {}",
        "known: dict[Any, Ranges] = {}",
        "view",
    ),
    # Others that share something.
    guarded("metadata-of-others-lost", "Metadata that another writer changes while a column", "promotion"),
    mutant(
        "lease-without-fencing",
        "Two processes that read a budget at once would both spend what it has left.",
        "self.uri, operation, read_version=found.version, max_retries=0, **access",
        "self.uri, operation, read_version=lance.dataset(self.uri, **access).version, **access",
        "limit",
    ),
    guarded("key-changed-in-a-load", "A row whose key changed during a load would get the values", "load"),
    # What the package once had.
    mutant(
        "once-compaction-in-a-run",
        "Rows that a compaction moves during the run would be left for the next one.",
        "_MOST_ROUNDS = 8\n",
        "_MOST_ROUNDS = 0\n",
        "column",
    ),
    mutant(
        "once-moved-rows-of-two-commits",
        "Rows that another writer moved between two commits of a run would be computed again by the next.",
        "known = {result.version, *earlier}",
        "known = {result.version}",
        "crossed",
    ),
    guarded("once-moved-in-a-job-then-cleaned", "Rows that moved with their value during a job", "vacuumed"),
    guarded("once-moved-from-a-job-that-died", "Rows that moved with the value of a job that died", "moved"),
    guarded("once-facts-of-a-later-version-dropped", "Facts that a job writes while a cleanup drops others", "pruned"),
    guarded("once-vacuum-in-a-commit", "A data file that a cleanup removed during the commit", "vacuumed"),
)
"""Those whose name begins with `once` are defects that the package had.

Not here, because no end of a world tells them from what is allowed: a cleanup that trusts its list of jobs (a job that
is planned during the cleanup may find values that are then removed; it leaves their rows to the next run), and a finish
that comes late and ends a job that was planned again (a world gives each plan a job of its own). Not here, because it
shows itself on Spark only: a load that cut its groups from all fragments.
"""


def find(name: str) -> Mutant:
    return next(one for one in MUTANTS if one.name == name)


def mutate(name: str, folder: Path) -> Path:
    """Write a copy of the package with a defect below a folder; return what comes first on the path then."""
    guard = GUARDS[int(name.removeprefix("guard-"))] if name.startswith("guard-") else find(name).guard
    home = folder / "mutant"
    copy = home / "airflow_geneva"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = guard.file(copy)
    file.write_text(file.read_text(encoding="utf-8").replace(guard.code, guard.without), encoding="utf-8")
    return home
