"""The guards that `make mutants` removes, and the tests that must fail then."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Guard:
    """One guard of the engine.

    Args:
        why: what goes wrong without it.
        code: text that is in the package exactly once.
        without: the same text without the guard.
        tests: what to run, as pytest takes it, below ``tests/``; takes seconds.
    """

    why: str
    code: str
    without: str
    tests: tuple[str, ...]

    def file(self, package: Path) -> Path:
        """The module of a package that has the code.

        Raises:
            LookupError: none has it, or more than one, or one twice.
        """
        found = [path for path in sorted(package.rglob("*.py")) if self.code in _read(path)]
        if len(found) != 1 or _read(found[0]).count(self.code) != 1:
            raise LookupError(f"found in {[path.name for path in found]}, once is right: {self.code}")
        return found[0]


@cache
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


COMMIT = "commit/test_commit.py::"
UNKNOWN = "plan/test_unknown_values.py::"
RACES = "promises/test_view_races.py::"
REMADE = "promises/test_recreated_tables.py::"
PLACES = "promises/test_opened_places.py::"
CATALOGS = "storage/test_catalogs.py::"
STATE = "views/test_state.py::"
FACTS = "checkpoint/test_facts.py::"
STORE = "checkpoint/test_store.py::"
NESTED = "plan/test_nested_inputs.py"
BACKFILL = "run/test_backfill.py::"
CONTINUED = "promises/test_continued_runs.py::"
JUDGED = "run/test_expectations.py::test_a_rule_about_the_column_judges_the_rows_that_the_commit_makes_visible"
SKIPPED = "apply/test_skipped_rows.py::"
CLEANUP = "cleanup/test_cleanup.py::"
PROMOTED = "run/test_promotion.py::"
SIBLINGS = "run/test_siblings.py::"
LOAD = "load/test_load.py::"
GROUPS = "views/test_groups.py::"
FOLDS = "views/test_folds.py::"
ANSWERS = "functions/test_answers.py::"
COLUMNS = "views/test_columns.py::"
SOUND = "lance_io/test_sound_arrays.py::"
VALUES = "apply/test_values.py::"

GUARDS = [
    # What others wrote: bounded before native code sees it.
    Guard(
        "A page of another site could start DAG runs by the cookie of a user's browser and a header of its own.",
        'if scheme.lower() != "bearer":',
        "if not scheme:",
        ("airflow/test_namespace_server.py::test_a_page_of_another_site_cannot_ask_in_the_name_of_a_user",),
    ),
    Guard(
        "A filter that adds a column 3,000 times would end the process, which native code recurses in.",
        "if here.tokens + here.deepest > MOST_IN_A_TERM:",
        "if False:",
        ("lance_io/test_sql_text.py::test_sql_that_would_end_the_process_is_refused_by_its_size",),
    ),
    Guard(
        "Rows that LSM writes keep outside of all fragments would be left out, and the job would be DONE.",
        "        if dataset.mem_wal_index_details() is None:\n",
        "        if True:\n",
        ("plan/test_mem_wal.py",),
    ),
    # Places: what a table names is opened only where the user allowed it.
    Guard(
        "A table whose manifest names a folder of another database would be read with the job's credentials.",
        "    for base in dataset.base_paths().values():\n",
        "    for base in ():\n",
        (PLACES + "test_a_table_whose_rows_lie_in_another_database_is_not_opened",),
    ),
    Guard(
        "A blob would put any file of a worker into a column.",
        "                _check_descriptors(dataset, batch)\n",
        "                pass\n",
        (PLACES + "test_a_blob_that_names_a_file_of_the_machine_is_not_read",),
    ),
    Guard(
        "A library that decodes a name would leave the folder that this package saw.",
        "        decoded = unquote(path)\n",
        "        decoded = path\n",
        ("storage/test_places.py",),
    ),
    Guard(
        "A table of Iceberg would have files of other folders read.",
        '            places.check(path if scheme == "file" else location, document)\n',
        "            pass\n",
        ("load/test_iceberg.py::test_a_manifest_list_elsewhere_is_not_opened",),
    ),
    Guard(
        "Times of INT96 beyond those of nanoseconds would be loaded as other times.",
        "    if not nanos.cast(micros.type, safe=False).equals(micros):\n",
        "    if False:\n",
        ("load/test_parquet.py::test_files_are_loaded_right_or_refused",),
    ),
    Guard(
        "Properties of an Iceberg table would choose the endpoint that gets the credentials.",
        'if key not in table.metadata.properties and not key.endswith("-impl")',
        "if True",
        ("load/test_iceberg.py::test_no_property_of_a_table_chooses_code_endpoint_or_credentials",),
    ),
    # Identity: what a value was computed from.
    Guard(
        "A checkpoint, or what a filter selected, would be used for a struct whose nested fields swapped names.",
        "return f\"{self.where or ''}\\0nested:{self.nested}\" if self.nested else self.where",
        "return self.where",
        (NESTED,),
    ),
    Guard(
        "Functions of one name and version in two modules would get each other's values from the cache.",
        'code = md5(f"{kind}\\0{identity}")[:16]',
        "code = md5(str(kind))[:16]",
        ("apply/test_dedup.py::test_functions_of_one_name_and_version_in_two_modules_have_values_of_their_own",),
    ),
    Guard(
        "A moved row would keep a value that was computed from other nested fields of its input.",
        "if any(columns.names) and columns_of(dataset, inputs, (), None).inputs_text != columns.inputs_text:",
        "if False:",
        (NESTED + "::test_a_moved_row_is_not_compared_with_a_version_that_had_other_nested_fields",),
    ),
    Guard(
        "Values of the nested fields that an input had when they were planned would become visible beside others.",
        "reason = _reason(dataset, now, candidate, output, data) if same_inputs else _OTHER_INPUTS",
        "reason = _reason(dataset, now, candidate, output, data)",
        (NESTED + "::test_rows_whose_nested_fields_change_during_a_run_are_left_for_the_next",),
    ),
    Guard(
        "A column would keep its values when an input gets the field id of one that was dropped.",
        "if self._inputs_in(made_of) - self._inputs_in(group.new_fragments):",
        "if False:",
        (NESTED + "::test_an_input_that_gets_the_field_id_of_a_dropped_one_was_not_computed_from",),
    ),
    # Storage: nothing outside of a table is listed, read, written or removed.
    Guard(
        "Upkeep would remove the jobs of another table, to which a link in the folder of jobs leads.",
        "folders = [item.name for item in inside if item.is_dir(follow_symlinks=False)]",
        "folders = [item.name for item in inside if item.is_dir()]",
        (CLEANUP + "test_upkeep_does_not_follow_a_link_to_the_jobs_of_another_table",),
    ),
    Guard(
        "Documents would be written and removed where a link in a table leads.",
        "        if self.is_linked(path):\n            raise StorageError(",
        "        if False:\n            raise StorageError(",
        (CLEANUP + "test_upkeep_does_not_follow_a_link_to_the_jobs_of_another_table",),
    ),
    Guard(
        "A refresh would copy rows of any database into a view whose definition somebody has changed.",
        "elif database not in allowed and (view.uri, database) not in _created:",
        "elif False:",
        ("views/test_sources.py::test_a_definition_opens_no_other_database",),
    ),
    Guard(
        "An edited XCom could choose another plan of a job, whose code Spark would run.",
        "if recorded != fingerprint and (recorded is not None or saved.shards):",
        "if False:",
        ("airflow/test_apply_operator.py::test_who_may_edit_xcoms_may_not_choose_a_plan",),
    ),
    # Code: only what makes a UDF is imported for a table.
    Guard(
        "A path in a table would import any module whose source binds the name, such as pyspark.shell.",
        'if _Reader().makes_udf(module, tree, name.split(".")):',
        'if any(_bound(tree, name.partition(".")[0])):',
        (
            "udf/test_udf_import.py::test_a_name_that_the_source_makes_no_udf_of_is_not_imported_and_no_package_around_it",
        ),
    ),
    # Reading: one fragment that cannot be decoded ends alone, and its job is FAILED.
    Guard(
        "A damaged file would leave all rows of its job without a value.",
        "        except UnreadableFragment as unreadable:\n",
        "        except NotImplementedError as unreadable:\n",
        ("promises/test_broken_files.py",),
    ),
    Guard(
        "A job whose fragment cannot be read would only be PARTIAL in every run, and the file would not be named.",
        'return self.unmet or "\\n".join(found) or too_many',
        "return self.unmet or too_many",
        ("promises/test_broken_files.py",),
    ),
    # Commit: what is committed fits the newest version.
    Guard(
        "A commit that landed although the store answered with an error would be said to have failed.",
        "            committed = self._landed(place, int(newest.version), made, error)\n",
        "            raise\n",
        (COMMIT + "test_the_outcome_of_a_commit_that_the_store_answered_with_an_error_is_looked_up",),
    ),
    Guard(
        "Values of inputs that another writer replaced in place would become visible.",
        "if now.inputs != planned.inputs or now.physical_rows != planned.physical_rows:",
        "if now.physical_rows != planned.physical_rows:",
        (COMMIT + "test_inputs_replaced_in_place_before_the_commit_are_seen",),
    ),
    Guard(
        "Rows that a restore brought back would become visible without a value.",
        "if staged.deletion != files.deletion and not staged.live.contains(live):",
        "if False:",
        (COMMIT + "test_rows_that_a_restore_brings_back_keep_the_value_they_had",),
    ),
    Guard(
        "A staged file of a dropped column would fill the column that has its name now.",
        "if staged.output_field_ids != output_fields or staged.output_files != files.output:",
        "if staged.output_files != files.output:",
        (BACKFILL + "test_a_re_added_column_of_another_type_is_computed_in_that_type",),
    ),
    Guard(
        "A staged file with old values that were replaced since would count as ready.",
        "if staged.output_field_ids != output_fields or staged.output_files != files.output:",
        "if staged.output_field_ids != output_fields:",
        (COMMIT + "test_a_staged_file_with_old_values_that_were_replaced_since_is_put_together_again",),
    ),
    Guard(
        "A staged file without all due rows would be committed.",
        "or not settled.contains(due):",
        "or False:",
        (COMMIT + "test_rows_that_failed_in_a_job_that_never_committed_are_tried_again",),
    ),
    Guard(
        "A staged file that is gone or damaged would be committed.",
        "return data.count_rows(dataset, staged.file, staged.physical_rows, staged.size_bytes) == staged.physical_rows",
        "return True",
        (COMMIT + "test_a_damaged_staged_file_is_never_committed",),
    ),
    Guard(
        "Inputs that were replaced between the check and the commit would not be noticed: Lance reports no conflict.",
        "found = replace(found, fitting=(), left=tuple((candidate, _REPLACED) for candidate in others))",
        "found = replace(found, fitting=(), done=(*found.done, *others), left=())",
        (COMMIT + "test_inputs_replaced_in_place_during_the_commit_are_seen",),
    ),
    Guard(
        "What no longer fits when a whole-column expectation has been checked would count in its verdict.",
        "verdict = self._follow_before(verdict) if at_once else verdict\n                check(verdict)",
        "verdict = self._follow_before(verdict) if at_once else verdict",
        (JUDGED,),
    ),
    Guard(
        "A function that returns no boolean would find that all values are as expected.",
        "if answer is None or _is_of_pandera(function):",
        "if not isinstance(answer, (bool, list)):",
        ("run/test_expectations.py::test_what_a_function_returns_is_a_truth_value_or_one_a_row",),
    ),
    Guard(
        "Rows that were deleted since they were computed would count in the verdict of a whole-column expectation.",
        "if files.deletion == staged.deletion:",
        "if True:",
        (JUDGED,),
    ),
    Guard(
        "A view would replace a table that another writer created meanwhile.",
        "        if exists():\n            return None\n",
        "",
        ("storage/test_creations.py::test_what_another_writer_created_meanwhile_stays",),
    ),
    Guard(
        "A conflict with another writer would fail the job at once.",
        "if is_undecided(error):\n                self.newest, self.unsure = None, True",
        "if False:\n                self.newest, self.unsure = None, True",
        (COMMIT + "test_a_table_that_never_rests_ends_in_a_conflict_and_loses_nothing",),
    ),
    Guard(
        "A job would not tell of a commit that landed although its answer was lost.",
        "self.newest, self.unsure = None, True",
        "pass",
        (COMMIT + "test_a_commit_that_landed_and_was_answered_with_an_outage_or_a_conflict_is_told",),
    ),
    Guard(
        "Values of replaced inputs whose commit landed without an answer would stop every later run.",
        "self._learn(self._stale_facts(verdict))",
        "pass",
        (COMMIT + "test_values_of_replaced_inputs_whose_commit_landed_without_an_answer_stop_no_later_run",),
    ),
    Guard(
        "The first conflict with another writer would be the last.",
        "tries = max_retries() + 1",
        "tries = 1",
        (COMMIT + "test_a_table_that_never_rests_ends_in_a_conflict_and_loses_nothing",),
    ),
    Guard(
        "Rows that were deleted between plan and commit would count as computed.",
        "return (self.staged.computed & self.task.due) - self.hidden",
        "return self.staged.computed & self.task.due",
        (COMMIT + "test_what_does_not_touch_the_planned_rows_costs_nothing",),
    ),
    Guard(
        "Rows that an update of another column moved during the run would have no value, and count as computed.",
        "hidden = [c.lost(c.hidden & c.task.due, _UPDATED) for c in there if c.hidden & c.task.due]",
        "hidden: list[LostRows] = []",
        (COMMIT + "test_rows_that_others_only_move_become_visible_and_run_once",),
    ),
    Guard(
        "Rows whose inputs an update changed during the run would get values of their old inputs.",
        "yield _Moved(fragment, one, rows.ids[part & (rows.now >> 32 == fragment)], same)",
        "yield _Moved(fragment, one, rows.ids[part & (rows.now >> 32 == fragment)], True)",
        (COMMIT + "test_of_rows_that_an_update_moves_only_the_changed_are_left",),
    ),
    Guard(
        "Values that others wrote into rows that a compaction moved would be overwritten.",
        "same = origin.fragment in unwritten and origin.fragment.output == one.task.files.output",
        "same = True",
        (COMMIT + "test_values_that_others_wrote_into_compacted_rows_stay",),
    ),
    Guard(
        "A data file that a cleanup removed during the commit would stay named, and its rows count as computed.",
        "return _DONE if is_staged_complete(dataset, staged, data) else _REMOVED",
        "return _DONE",
        (COMMIT + "test_a_data_file_that_a_cleanup_removes_during_the_commit_is_written_again",),
    ),
    Guard(
        "A fact would say that all live rows are computed although a filter left some out.",
        "return candidate.staged.deletion if settled.contains(candidate.staged.live) else None",
        "return candidate.staged.deletion",
        (BACKFILL + "test_where_computes_what_it_selects_and_keeps_the_rest",),
    ),
    Guard(
        "A filter whose column was replaced during the commit would not be evaluated again.",
        "signature = candidate.task.files.where_signature(output)",
        "signature = now.where_signature(output)",
        (COMMIT + "test_filter_columns_replaced_in_place_are_looked_at_again",),
    ),
    Guard(
        "Values that a job committed right before it was killed would stop every later run.",
        "self._open_commits.get(version, {}).keys()",
        "()",
        (COMMIT + "test_a_job_that_dies_after_it_committed_values_of_replaced_inputs_stops_no_later_run",),
    ),
    Guard(
        "A job that died after its commit would be forgotten once the facts are folded.",
        'marks += [Fact("", f"{_OPEN}{job}", None, at) for job, at in newest]',
        "pass",
        (COMMIT + "test_a_job_that_dies_after_it_committed_values_of_replaced_inputs_stops_no_later_run",),
    ),
    Guard(
        "A data file that was removed before a commit that no answer told of would be missing for good.",
        "self.data.look_again(dataset, [candidate.staged.file for candidate in verdict.done])",
        "pass",
        (COMMIT + "test_a_data_file_that_a_cleanup_removes_during_the_commit_is_written_again",),
    ),
    Guard(
        "A run would be done with rows whose data file others removed twice.",
        "if not all(LanceFile.of_table(self.newest, path).exists() for path in here):",
        "if False:",
        (COMMIT + "test_a_data_file_that_is_removed_before_and_after_its_commit_is_due_again",),
    ),
    Guard(
        "Commits would not be told after which rows had to be computed again.",
        "self._written.update(committer.versions)",
        "pass",
        (COMMIT + "test_what_a_cleanup_removes_after_the_plan_has_found_it_is_computed_by_the_same_run",),
    ),
    Guard(
        "Rows that the plan found staged, and that were removed since, would be left to the next run.",
        "FragmentTasks(replace(task, missing=task.due, staged=False) for task in here)",
        "FragmentTasks(here)",
        (COMMIT + "test_what_a_cleanup_removes_after_the_plan_has_found_it_is_computed_by_the_same_run",),
    ),
    Guard(
        "A view would show rows without their snapshot if the store failed to write it once.",
        "saved = saved or bool(loose)",
        "saved = True",
        (STATE + "test_a_snapshot_that_the_store_failed_to_write_is_there_before_the_swap",),
    ),
    Guard(
        "Rows whose data file was removed during the last commit of a killed job would count as computed for good.",
        "if self.computed.lost:",
        "if False:",
        (COMMIT + "test_a_data_file_that_is_removed_during_a_commit_whose_job_dies_is_written_by_the_next",),
    ),
    Guard(
        "Each retry of a job would fail that was planned on a version whose data file others removed.",
        "if version_exists(self.newest, int(self.source.version)) and not lacks_data_file(error):",
        "if version_exists(self.newest, int(self.source.version)):",
        (COMMIT + "test_rows_of_a_version_without_a_data_file_are_not_compared_with_it_by_a_job",),
    ),
    Guard(
        "Each plan would fail that compares rows with a version whose data file others removed.",
        "if version_exists(self.dataset, version) and not lacks_data_file(error):",
        "if version_exists(self.dataset, version):",
        (COMMIT + "test_rows_of_a_version_without_a_data_file_are_not_compared_with_it_by_a_plan",),
    ),
    Guard(
        "A retry would take a committed file that was removed for another writer's, and never write it again.",
        "if now is not None and _replaces_a_removed_file(dataset, now, candidate, output):",
        "if False:",
        (COMMIT + "test_a_data_file_that_is_removed_during_a_commit_whose_job_dies_is_written_by_its_retry",),
    ),
    Guard(
        "Rows whose data file was removed during a commit would count as computed after a retry that could not help.",
        "if result.commits and spec.keeps_facts and not gone:",
        "if result.commits and spec.keeps_facts:",
        (COMMIT + "test_a_data_file_that_is_removed_during_a_commit_whose_job_dies_is_written_by_its_retry",),
    ),
    Guard(
        "A job would commit to a table that was created again under the same name.",
        "_, made, _ = place.checkpoints.side_by_side(first, transaction, partial(self.assert_same_table, options))",
        "_, made = place.checkpoints.side_by_side(first, transaction)",
        (REMADE + "test_nothing_is_committed_to_a_table_that_is_made_again_while_staged_files_are_verified",),
    ),
    Guard(
        "A job would commit to a table that its catalog has moved or renamed.",
        "return catalogs.describe(self.options, anew=True).uri == self.uri",
        "return True",
        (CATALOGS + "test_a_table_that_its_catalog_names_no_longer_is_left_as_it_is",),
    ),
    Guard(
        "A commit that a catalog recorded for the new table of that name would stay there.",
        "return replace(self, uri=now.uri) if now is not None and now.managed_versioning else self",
        "return self",
        (CATALOGS + "test_a_table_that_its_catalog_names_no_longer_is_left_as_it_is",),
    ),
    Guard(
        "A commit that reached a table that was created again would stay there.",
        "if not current:\n            self._take_back(",
        "if False:\n            self._take_back(",
        (REMADE + "test_a_commit_that_reached_the_new_table_is_taken_back_unless_others_have_built_on_it",),
    ),
    Guard(
        "A table that was created again would pass for the planned one once it has as many versions.",
        'return self.commit in ("", now.commit)',
        "return True",
        (REMADE + "test_a_commit_that_reached_the_new_table_is_taken_back_unless_others_have_built_on_it",),
    ),
    Guard(
        "Undoing a commit would undo the commits of others that came in between.",
        "if undone == version + 1:",
        "if True:",
        (REMADE + "test_what_others_commit_while_a_commit_is_taken_back_is_kept",),
    ),
    Guard(
        "A job of which a shard was not committed would end as DONE.",
        "result = replace(result, state=FAILED) if error else result",
        "pass",
        (COMMIT + "test_a_shard_that_is_missing_fails_the_job_and_keeps_what_is_there",),
    ),
    # Swap: a view shows a whole refresh, once.
    Guard(
        "A refresh would put rows into a view that another refresh or writer changed after planning.",
        "if newest.identity != swap.based_on:",
        "if False:",
        (STATE + "test_a_refresh_that_lost_a_race_leaves_no_doubt_about_the_winner",),
    ),
    Guard(
        "Two refreshes at once would both add their rows: Lance commits two swaps that share no fragment.",
        "removed, updated + anchor, files, data, whole)",
        "removed, updated, files, data, whole)",
        (RACES + "test_of_two_refreshes_that_swap_at_once_one_wins",),
    ),
    Guard(
        "Two refreshes of a view of groups at once would both add a new group.",
        "replace_rows(groups, removed, updated + anchor, added)",
        "replace_rows(groups, removed, updated, added)",
        (GROUPS + "test_refreshes_that_find_groups_at_the_same_time_do_not_make_one_twice",),
    ),
    Guard(
        "Different keys with one hash would be one group.",
        "if not same.all():",
        "if False:",
        ("views/test_group_keys.py::test_keys_that_share_a_hash_are_told_apart",),
    ),
    Guard(
        "A group would get the rows of another one whose key has the same hash.",
        "if shared and rows is not None and group is not None:",
        "if False:",
        (GROUPS + "test_keys_with_one_hash_are_different_groups",),
    ),
    Guard(
        "A view would lack the changes of groups whose keys stay.",
        "if field.name in (*grouped.keys, TOUCHED)",
        "if field.name in grouped.keys",
        (GROUPS + "test_a_refresh_computes_the_touched_groups_only",),
    ),
    Guard(
        "A value would be folded from a state with rows that the group has lost.",
        "if rows[at] + len(change.added[at]) != sizes[at]:",
        "if False:",
        (FOLDS + "test_a_group_that_lost_rows_is_computed_from_all_or_without_them",),
    ),
    Guard(
        "A value would be folded from the state of other code.",
        "[~there, stamp != self._stamp(column), unclear]",
        "[~there, stamp < 0, unclear]",
        (FOLDS + "test_other_code_is_never_given_the_states_of_earlier_code",),
    ),
    Guard(
        "Rows of a view of groups would get the row ids of other groups, where new and known groups are mixed.",
        "if most is None and not bool(",
        "if True or bool(",
        (GROUPS + "test_new_groups_before_known_ones_leave_these_their_row_ids",),
    ),
    Guard(
        "A column that a restore brings back would keep values from before its source column was followed again.",
        "followed.get(name, shown.source_version + 1) > shown.source_version",
        "name not in followed",
        (GROUPS + "test_columns_that_a_restore_brings_back_have_the_values_that_their_source_columns_got_meanwhile",),
    ),
    Guard(
        "After a kill between its hidden tables, a view would find and compute all groups anew.",
        "if commit.based_on == newest.identity:",
        "if False:",
        ("promises/test_group_kills.py::test_a_refresh_that_dies_between_its_steps_calls_each_function_once",),
    ),
    Guard(
        "A first refresh would take back what others did to the view since it looked: indexes, columns, rows.",
        "at_once=whole",
        "at_once=False",
        (RACES + "test_what_happens_to_a_view_just_before_its_swap_is_seen_by_this_refresh_or_the_next",),
    ),
    Guard(
        "Two first refreshes of an empty view with an index at once would both add their rows.",
        "if not dataset.get_fragments():",
        "if False:",
        (RACES + "test_of_two_refreshes_that_swap_at_once_one_wins",),
    ),
    Guard(
        "A refresh that loses against another one would fail instead of looking again.",
        "if not is_undecided(error):",
        "if True:",
        (RACES + "test_of_two_refreshes_that_swap_at_once_one_wins",),
    ),
    Guard(
        "A swap that an earlier try committed would be told as lost.",
        "if commit.properties.get(PLAN) == plan:",
        "if False:",
        (STATE + "test_a_swap_that_lies_far_back_is_not_done_again",),
    ),
    Guard(
        "Rows that are not set would stay in a view that others compacted.",
        'conditions += [f"NOT coalesce({IS_SET}, false)"] if unset[at] else []',
        "pass",
        (RACES + "test_placeholders_that_were_compacted_with_rows_leave_with_the_next_refresh",),
    ),
    Guard(
        "A first swap that got the number of a removed version would count as done, and no reader would see it.",
        "if newer and version_of_plan(newer[0], plan) is None:",
        "if False:",
        (STATE + "test_a_first_swap_that_got_the_number_of_a_removed_version_is_done_again",),
    ),
    Guard(
        "A retry would take a swap that got the number of a removed version for done.",
        "return None if was_overtaken(dataset, commit, following) else commit.version",
        "return commit.version",
        (STATE + "test_a_first_swap_that_got_the_number_of_a_removed_version_is_done_again",),
    ),
    Guard(
        "Later refreshes would take a swap that got the number of a removed version for what the view shows.",
        "if swap and not changed and was_overtaken(dataset, commit, following):",
        "if False:",
        (STATE + "test_a_first_swap_that_got_the_number_of_a_removed_version_is_done_again",),
    ),
    Guard(
        "What others did between the planned version and the swap would not be noticed.",
        "since = int(commit.properties[LOOKED_AT]) + 1 if swap else 0",
        "since = commit.version if swap else 0",
        (RACES + "test_what_happens_to_a_view_just_before_its_swap_is_seen_by_this_refresh_or_the_next",),
    ),
    Guard(
        "The schema metadata would be believed although a later swap may have been committed.",
        "if not job_id or read_intents(location) - {snapshot}:",
        "if not job_id:",
        (STATE + "test_of_a_job_that_swapped_twice_the_metadata_is_not_taken_for_the_second_swap",),
    ),
    Guard(
        "A swap would leave no record of what it is about to do.",
        "partial(write_intent, location, key)",
        "int",
        (STATE + "test_of_a_job_that_swapped_twice_the_metadata_is_not_taken_for_the_second_swap",),
    ),
    Guard(
        "A swap that landed and was answered with a conflict would be forgotten, and its rows added again.",
        "if key and newest.snapshot else ()",
        "if key else ()",
        (STATE + "test_a_swap_that_landed_although_it_was_told_to_conflict_is_not_forgotten_with_the_versions",),
    ),
    Guard(
        "A swap that never happened would make the view's state unknown for all time.",
        "partial(drop_intents, location, swapped.dropped)",
        "partial(drop_intents, location, ())",
        (STATE + "test_a_swap_that_was_begun_and_not_done_is_forgotten_with_the_next",),
    ),
    Guard(
        "A view would be swapped although rows of a shard are missing.",
        "if version is None and staged.missing:",
        "if False:",
        ("promises/test_broken_files.py", "views/test_refresh.py"),
    ),
    # Facts: what counts as computed.
    Guard(
        "Rows that were live under another deletion file would count as computed.",
        "return self.rows is None or self.live_under == deletion",
        "return self.rows is None or self.live_under is not None",
        (FACTS + "test_rows_that_were_all_alive_under_one_deletion_file_are_not_all_under_another",),
    ),
    Guard(
        "A reader whose ledgers were folded and removed after it listed them would miss their facts.",
        "if missed <= (now := set(store.list_keys()) if missed else set()):",
        "now: set[str] = set()\n        if True:",
        (FACTS + "test_who_listed_ledgers_that_are_then_folded_and_removed_reads_the_fold",),
    ),
    Guard(
        "Facts would be lost with a fold that is damaged: its ledgers go too early.",
        "store.remove(state.folded)",
        "store.remove(state.folded.union(state.ledgers))",
        (FACTS + "test_a_fold_that_is_damaged_leaves_the_ledgers_it_was_made_of",),
    ),
    Guard(
        "Facts of ledgers that cannot be read now would be lost with the next pruning.",
        "covers = json.dumps(sorted(state.folded.union(state.ledgers)))",
        "covers = json.dumps(sorted(store.list_keys()))",
        ("cli/test_checkpoints.py::test_what_a_ledger_says_that_cannot_be_read_now_is_not_dropped",),
    ),
    Guard(
        "Facts that a job writes while a cleanup drops others would be lost, and stop each later run.",
        '    recent = pc.or_(recent, pc.greater(facts["at"], max(existing, default=0)))\n',
        "",
        (CLEANUP + "test_facts_that_a_job_writes_while_a_cleanup_drops_others_stay",),
    ),
    Guard(
        "Rows that moved with their value during a job would stop each run once earlier versions are cleaned up.",
        "if version not in self.state.moved and version not in self._open_commits:",
        "if True:",
        (COMMIT + "test_rows_that_move_with_their_value_during_a_job_are_due_if_earlier_versions_are_cleaned_up",),
    ),
    Guard(
        "Rows that moved with the value of a job that died would stop each run after another one has ended.",
        "commits_newest_first(dataset, commits[-1], planned + 1)",
        "commits_newest_first(dataset, commits[-1], commits[0])",
        (COMMIT + "test_rows_that_move_after_the_commit_of_a_job_that_dies_are_due_although_another_job_ends",),
    ),
    Guard(
        "Facts would be dropped although the versions that they match could not be read.",
        "if signatures is None:\n        return 0",
        "if signatures is None:\n        signatures = set()",
        ("cli/test_checkpoints.py::test_nothing_is_dropped_when_the_history_cannot_be_read_or_little_is_gained",),
    ),
    Guard(
        "A fragment would keep its facts after its inputs were replaced.",
        "return md5(repr((self.inputs, tuple(output))))",
        "return md5(repr(tuple(output)))",
        (BACKFILL + "test_inputs_replaced_in_place_are_computed_again",),
    ),
    Guard(
        "A row that was updated between two compactions would count as computed.",
        "kept = living.mask(ids)",
        "kept = np.ones(len(ids), np.bool_)",
        (BACKFILL + "test_a_row_updated_between_two_compactions_is_not_taken_for_computed",),
    ),
    Guard(
        "Values that another writer put into a compacted fragment would count as computed.",
        "return None if found is None or (same_output and found.made.output != fragment.output) else found",
        "return found",
        (BACKFILL + "test_values_that_others_wrote_into_a_compacted_fragment_are_computed_again",),
    ),
    Guard(
        "A row that an update moved and changed would count as computed.",
        "alike &= same_values(old, new)",
        "pass",
        ("promises/test_exactness.py::test_only_rows_that_changed_by_value_are_run",),
    ),
    Guard(
        "0.0 that becomes -0.0 would count as unchanged, and NaN as changed each time.",
        "(ours.view(bits) == theirs.view(bits)) | (np.isnan(ours) & np.isnan(theirs))",
        "ours == theirs",
        ("plan/test_value_diff.py",),
    ),
    Guard(
        "Values of other code would be left or overwritten without a decision of the user.",
        "if at_stake and on_code_change == OnCodeChange.ERROR:",
        "if False:",
        (BACKFILL + "test_changed_code_stops_and_names_versions_and_rows",),
    ),
    # Checkpoints: what is reused is what was computed, for these rows, by this code.
    Guard(
        "A flipped bit in a checkpoint would become a value.",
        "(whole and sums[name] is not None and sums[name] != _column(column))",
        "False",
        (STORE + "test_a_flipped_bit_is_no_other_value",),
    ),
    Guard(
        "A checkpoint that another job replaced while it is read would give values of other rows.",
        "if not np.array_equal(batch.column(ROW_ID).to_numpy(zero_copy_only=False), piece.row_ids):",
        "if False:",
        (COMMIT + "test_checkpoints_replaced_by_another_job_while_they_are_read_are_not_mixed_up",),
    ),
    Guard(
        "Checkpoints of another output type or other deps would be reused.",
        "if content is None or content.agreement != reuse_rules.agreement:",
        "if content is None:",
        (BACKFILL + "test_range_checkpoints_of_another_type_are_not_used",),
    ),
    Guard(
        "A checkpoint of a row that was updated before a compaction would be reused.",
        "Ranges.from_offsets(offsets[among(ids, o.row_ids)]))\n                    for o",
        "Ranges.of(0, files.physical_rows))\n                    for o",
        (BACKFILL + "test_a_checkpoint_of_a_row_that_was_updated_before_a_compaction_is_not_used",),
    ),
    Guard(
        "A checkpoint of a row whose inputs were updated since would be reused.",
        "rows.now[rows.same & (fragments == fragment)]",
        "rows.now[fragments == fragment]",
        (CONTINUED + "test_a_killed_run_repeats_an_interval",),
    ),
    Guard(
        "A row of the source that became no row of an exploded view would get the rows of another one.",
        "np.where(ids[at] == wanted, lengths[at], 0)",
        "lengths[at]",
        (CONTINUED + "test_a_killed_run_repeats_an_interval",),
    ),
    Guard(
        "A checkpoint of a row that the filter no longer selects would be reused.",
        "return Columns((*self.inputs, *self.where), (), (), self.names)",
        "return Columns(self.inputs, (), (), self.names)",
        (CONTINUED + "test_a_row_that_the_filter_no_longer_selects_gets_no_value",),
    ),
    Guard(
        "Values of rows that moved would be lost with the checkpoint of the fragment that they left.",
        "staged = staged.replacing(self.replaced)",
        "pass",
        (CONTINUED + "test_values_of_moved_rows_outlast_the_checkpoint_that_replaces_theirs",),
    ),
    Guard(
        "Rows that failed in an earlier job would never run again.",
        "return failures.all - failures.standing(self.job_id, tried)",
        "return Ranges.empty()",
        (SKIPPED + "test_failed_rows_are_tried_in_three_runs_and_then_only_listed",),
    ),
    Guard(
        "The checkpoints of a file that another job replaced meanwhile would be removed.",
        "if broken.__cause__ is not None:",
        "if True:",
        (COMMIT + "test_checkpoints_replaced_by_another_job_while_they_are_read_are_not_mixed_up",),
    ),
    Guard(
        "A file that a full disk cut short would be named by a checkpoint.",
        "whole = file.read() == _LAST_BYTES and size in (0, found)",
        "whole = True",
        ("promises/test_disk_failures.py::test_a_full_disk_is_said_and_what_was_computed_before_is_kept",),
    ),
    Guard(
        "Documents would be removed although the pack that replaces them cannot be read.",
        "if packs.add(values):",
        "if packs.add(values) or True:",
        (STORE + "test_documents_stay_when_their_pack_cannot_be_read_back",),
    ),
    Guard(
        "A plan that was changed after planning would be carried out.",
        "if sha256(data) != digest:",
        "if False:",
        ("plan/test_saved_plan.py",),
    ),
    Guard(
        "A worker that has other code than planned would compute with it.",
        "if udf.code_version != self.version:\n            raise",
        "if False:\n            raise",
        ("apply/test_isolation.py::test_other_code_under_the_same_name_is_refused",),
    ),
    Guard(
        "A row that crashes its worker would cost a second start of a worker.",
        "if lost.timed_out or lost.by_itself or (alone and self.deaths[row] > 1):",
        "if lost.timed_out or (alone and self.deaths[row] > 1):",
        ("apply/test_isolation.py::test_a_row_that_ends_its_worker_costs_one_start",),
    ),
    Guard(
        "A job would skip more rows than its error policy allows.",
        "if message is not None:",
        "if False:",
        (SKIPPED + "test_more_skipped_rows_than_allowed_end_the_job_and_keep_what_was_computed",),
    ),
    # Files: nothing that is in use goes, nothing leaves its folder, no secret is kept.
    Guard(
        "A name in a plan would lead to a file outside of its folder.",
        'if name.startswith("/") or ".." in name.split("/") or "\\\\" in name:',
        "if False:",
        ("storage/test_storage.py::test_a_document_cannot_leave_its_folder",),
    ),
    Guard(
        "A reader would find half of a document that is being written.",
        "os.replace(file.name, target)",
        "Path(target).write_bytes(data)",
        ("storage/test_storage.py::test_a_document_that_is_being_read_is_not_written_over",),
    ),
    Guard(
        "A finish that comes late would end a job that was planned again.",
        'if record is None or (plan and record.get("plan") not in (None, plan)):',
        "if record is None:",
        ("job/test_record.py::test_a_finish_that_comes_after_its_job_was_planned_again_does_not_end_it",),
    ),
    Guard(
        "A password in an error message would stay in the job's record.",
        'ended["error"] = None if error is None else mask_secrets(error)',
        'ended["error"] = error',
        ("storage/test_storage.py::test_what_a_job_keeps_of_its_failure_names_no_credentials",),
    ),
    Guard(
        "The files of a job whose machine has another clock would be removed while it works.",
        "if found.open or (found.ended is None and is_touched(name)):",
        "if found.open:",
        (
            "promises/test_clocks.py::test_a_job_on_a_machine_with_another_clock_is_at_work_as_long_as_the_store_hears_of_it",
        ),
    ),
    Guard(
        "Checkpoints that the plan of a recent job uses would be removed.",
        "if planned.isdisjoint(places[group]) for file",
        "for file",
        (CLEANUP + "test_old_checkpoints_that_the_plan_of_a_recent_job_names_stay",),
    ),
    Guard(
        "A job that starts while garbage is removed would lose the checkpoints that it found.",
        'batch if not self._used(file.name.split("/")[1]))',
        "batch)",
        (CLEANUP + "test_a_job_that_starts_while_garbage_is_collected_keeps_what_it_found",),
    ),
    Guard(
        "A file that was committed while garbage is removed would be deleted.",
        "loose = without_referenced(dataset, names, since=self.garbage.version)",
        "loose = set(names)",
        (CLEANUP + "test_a_file_that_another_writer_commits_while_garbage_is_collected_stays",),
    ),
    Guard(
        "The value that a call returns after its timeout would become visible.",
        'raise timed_out(timeout, "was cancelled" if ended else "did not end when it was cancelled")',
        'if not ended:\n            raise timed_out(timeout, "did not end when it was cancelled")',
        ("apply/test_async_calls.py::test_a_value_returned_after_the_timeout_is_dropped",),
    ),
    Guard(
        "A service that leaves out a text and numbers its vectors anew would give nearly all texts another's vector.",
        "if len(items) != texts or numbered.keys() != set(range(texts)):",
        "if False:",
        (ANSWERS + "test_a_complete_answer_that_does_not_match_its_texts_is_asked_again_in_halves",),
    ),
    Guard(
        "A device that fails would fail every row of its tasks under a policy that skips.",
        "if stop - start == 1 and self._is_of_device(lost) and self._fails_on_others(inputs, start):",
        "if False:",
        ("apply/test_devices.py::test_a_device_that_fails_on_all_rows_fails_none_of_them",),
    ),
    Guard(
        "The tensors of a call that was too large would fill the device's memory while smaller calls are made.",
        "        release(error)\n    return found",
        "        pass\n    return found",
        ("apply/test_batches.py::test_what_a_failed_call_held_is_let_go_before_the_next_one",),
    ),
    Guard(
        "Values of rows that were sorted by weight would become those of other rows.",
        "order = np.argsort(rows)\n",
        "order = np.arange(len(rows))\n",
        (
            "apply/test_batches.py::test_rows_of_similar_weight_are_called_together_and_results_are_in_the_order_of_the_rows",
        ),
    ),
    Guard(
        "Another row than the first one would fail a job when rows are sorted, and rows before it would have no value.",
        "self.todo.appendleft((rows[at + 1 :], None))",
        "self.todo.clear()",
        ("apply/test_batches.py::test_the_first_row_that_fails_fails_the_job_and_all_rows_before_it_are_computed",),
    ),
    Guard(
        "Two processes would hold a model on one GPU.",
        "            POOL.dismiss()\n",
        "            pass\n",
        ("apply/test_devices.py::test_no_model_stays_on_a_gpu_that_the_next_task_does_not_have",),
    ),
    # Promotions: values, index and function of one model.
    Guard(
        "Metadata that another writer changes while a column is promoted would be lost.",
        "_repeat_metadata(location, committed, range(int(dataset.version) + 1, int(committed.version)))",
        "pass",
        (PROMOTED + "test_metadata_of_others_that_lance_would_lose_is_written_again",),
    ),
    Guard(
        "A promotion that dies right after its commit would lose metadata of others, although it is tried again.",
        "verified = self._verified_at(dataset) if plan is None else plan.version",
        "verified = int(dataset.version) if plan is None else plan.version",
        (PROMOTED + "test_a_promotion_that_is_tried_again_writes_metadata_that_the_one_before_it_replaced",),
    ),
    Guard(
        "A promotion that is tried again after a kill would fail, or be made twice.",
        "if promoted is None or self.column in names or self.keep_as not in names:",
        "if True:",
        (PROMOTED + "test_values_index_and_function_change_in_one_version_and_back",),
    ),
    Guard(
        "A candidate would be promoted although rows have come since it was verified.",
        "operation=lance.LanceOperation.Project(schema),",
        "operation=lance.LanceOperation.Project(schema, preserves_nullability=True),",
        (PROMOTED + "test_a_commit_between_is_verified_again",),
    ),
    Guard(
        "A backfill of what reads a promoted column would stop, as if its code had changed.",
        "if provenance not in self.of_replaced}",
        "}",
        (PROMOTED + "test_columns_that_read_it_go_on_with_the_name_and_are_due",),
    ),
    Guard(
        "A query would be embedded by another function than the values that it is compared with.",
        "if udf.code_version not in made:",
        "if False:",
        ("run/test_column_function.py::test_code_that_computed_none_of_the_values_is_refused",),
    ),
    Guard(
        "Values of a column that was dropped since would be read as those of another column of the same function.",
        "others = bool(self.output.fields) and staged.output_field_ids != self.output_ids",
        "others = False",
        (SIBLINGS + "test_what_a_killed_run_staged_is_not_read_with_a_column_less",),
    ),
    Guard(
        "A garbage collection would remove what an open job of several columns has computed.",
        "column = job.key_column or job.column",
        "column = job.column",
        (SIBLINGS + "test_what_an_open_job_has_computed_is_no_garbage",),
    ),
    Guard(
        "Every delivery would write all fragments again.",
        "differs = replaced & ~_same(before, values)",
        "differs = replaced",
        (LOAD + "test_a_second_delivery_writes_only_the_fragments_whose_values_differ",),
    ),
    Guard(
        "A delivery would replace the values of a function unasked.",
        "if definition is not None and not adopt:",
        "if False:",
        (LOAD + "test_a_computed_column_is_loaded_only_as_its_functions_values",),
    ),
    Guard(
        "A row whose key changed during a load would get the values of its former key.",
        "same_inputs = all(columns_in(dataset, columns.inputs_text, columns.output)[1])",
        "same_inputs = True\n    columns = replace(columns, inputs=())",
        (LOAD + "test_rows_whose_keys_change_during_a_load_are_left",),
    ),
    Guard(
        "A batch API that leaves out a request and numbers its answers anew would give rows the answers of others.",
        "if left and complete:",
        "if False:",
        (ANSWERS + "test_a_completed_batch_that_does_not_match_its_requests_is_refused_as_a_whole",),
    ),
    # Spark.
    Guard(
        "Two tasks that claim a group of rows at once would both compute it.",
        "if self._known.get(group) == {task}:",
        "if task in self._known.get(group, set()):",
        ("spark/test_claims.py::test_a_group_that_two_tasks_claim_at_once_is_left_to_the_driver",),
    ),
    # Code.
    Guard(
        "A worker that ran another job would compute with the helpers of that job's code.",
        "if others := code_archive.prefer(self.archives):",
        "if others := list[str]():",
        ("spark/test_code_zip.py::test_a_process_that_runs_several_jobs_runs_for_each_the_code_that_was_planned",),
    ),
    Guard(
        "An archive would hold some files of before and some of after a deployment.",
        "if _signature(before) == _signature(dict(self._list(start))):",
        "if True:",
        ("spark/test_code_zip.py::test_files_that_change_while_they_are_read_are_read_again",),
    ),
    Guard(
        "An archive of another platform would hide the package that is installed on the workers.",
        "if foreign := foreign_modules(names):",
        "if foreign := list[str]():",
        ("spark/test_code_zip.py::test_an_archive_of_another_platform_hides_no_installed_package",),
    ),
    Guard(
        "One text that is not UTF-8 would make a whole table unreadable.",
        "    values.validate(full=True)\n    if isinstance(values, pa.ChunkedArray):",
        "    if isinstance(values, pa.ChunkedArray):",
        (SOUND + "test_rows_with_an_array_that_is_not_valid_are_refused",),
    ),
    Guard(
        "pylance would panic on decimals that Spark returns.",
        "return pa.concat_arrays([values]) if moved else values",
        "return values",
        (SOUND + "test_unaligned_buffers_are_written",),
    ),
    Guard(
        "A function would get times without their nanoseconds.",
        "    _check_precision(values)\n    found: list[Any] = values.to_pylist()",
        "    found: list[Any] = values.to_pylist()",
        (VALUES + "test_an_input_that_python_cannot_hold_is_a_failed_row_with_its_column_and_value",),
    ),
    Guard(
        "A column that reads a changed one would keep a value of its earlier input.",
        "if column.udf is not None and any(earlier.get(name) in found for name in column.columns):",
        "if column.name in found:",
        (COLUMNS + "test_a_changed_function_runs_alone_and_with_it_what_reads_it",),
    ),
    Guard(
        "Rows that carry values of earlier code would be taken for rows of the current code.",
        """        tag = f"{tag or ''}\\0carries {self.carries}" if self.carries else tag\n""",
        "",
        (COLUMNS + "test_rows_that_carry_values_of_earlier_code_do_not_count_as_computed_with_the_new_code",),
    ),
    Guard(
        "Rows that a source view renumbered would count as computed with the current code.",
        "            origins.setdefault(item.files.signature, []).extend(after)\n",
        "",
        ("views/test_origins.py::test_rows_that_a_source_view_renumbered_keep_the_code_of_their_values",),
    ),
    Guard(
        "A run of failed rows would leave a column that was added without values for good.",
        "code = tuple(one for one in code if one[0] in before)  # columns that were added are not computed yet",
        "pass",
        (COLUMNS + "test_an_added_column_waits_while_only_failed_rows_run",),
    ),
    Guard(
        "A column that was dropped and added again would be taken for computed.",
        'return first if self.since is None else f"{first}@{self.since}"',
        "return first",
        (COLUMNS + "test_a_column_that_is_dropped_and_added_again_holds_no_earlier_value",),
    ),
    Guard(
        "Values of a copy, a backup or another writer would be computed again, and paid, without a question.",
        "        if self.wanted.asks_about_values:\n",
        "        if False:\n",
        (UNKNOWN + "test_filled_values_of_unknown_origin_stop_a_plan",),
    ),
    Guard(
        "A user's values would be overwritten in a column with the field id of a dropped one.",
        "        mark_defined(self.table.checkpoints, first, int(dataset.version))\n",
        "",
        (UNKNOWN + "test_facts_about_a_dropped_column_do_not_count_for_another_one_with_its_field_id",),
    ),
    Guard(
        "Values that a restore brought back would be overwritten without a question.",
        "if changed - then.in_place and files.id in reference.manifest and self._was_undone(version):",
        "if False:",
        (UNKNOWN + "test_values_that_a_restore_brought_back_are_asked_about_again",),
    ),
    Guard(
        "A plan would ask about rows whose inputs changed, and an hourly DAG would stop.",
        "unknown = unknown - Ranges.union(part._of_a_job.get(files.id, Ranges.empty()) for part in parts)",
        "pass",
        (UNKNOWN + "test_rows_whose_inputs_changed_are_computed_without_a_question",),
    ),
    Guard(
        "A plan would ask about rows whose inputs changed, if the version with their values was cleaned up.",
        "unknown = unknown - self.state.stale(files.signature, files.physical_rows)",
        "pass",
        (
            UNKNOWN + "test_rows_whose_inputs_changed_are_known_after_a_cleanup_that_kept_only_a_version_without_"
            "their_values",
        ),
    ),
    Guard(
        "The event of a commit would be lost if another run finishes at that moment, and the run itself is given up.",
        " and max(committed, default=0) <= dataset.version",
        "",
        ("job/test_announce.py",),
    ),
]
