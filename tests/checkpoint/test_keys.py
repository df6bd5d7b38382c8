"""Checkpoint keys: one per piece of work, readable back, and safe as paths."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from airflow_geneva.engine.checkpoint.keys import (
    FragmentKey,
    WorkIdentity,
    key_part,
    key_to_path,
    parse_key,
    path_to_key,
)
from airflow_geneva.engine.storage.uri import md5

IDENTITY = WorkIdentity("embed", "1a2b", "vector", "id > 3", "/data/docs.lance")
NAMES = st.text(min_size=1, max_size=90)


def fragment_key(identity: WorkIdentity, fragment: int = 7) -> FragmentKey:
    return FragmentKey(identity.prefix, md5("files"), fragment)


def test_a_key_names_everything_that_the_seed_names_in_its_order() -> None:
    assert fragment_key(IDENTITY).range(10, 20) == (
        f"udf-embed_ver-1a2b_col-vector_where-{md5('id > 3')}_uri-{md5('/data/docs.lance')}"
        f"_srcfiles-{md5('files')}_frag-7_range-10-20"
    )


@pytest.mark.parametrize(
    "change", [{"udf": "other"}, {"version": "2"}, {"column": "c"}, {"where": "id > 4"}, {"where": None}, {"uri": "/e"}]
)
def test_work_that_differs_in_anything_has_another_prefix(change: dict[str, str | None]) -> None:
    assert replace(IDENTITY, **change).prefix != IDENTITY.prefix


@pytest.mark.slow
@given(NAMES, NAMES)
def test_two_names_never_share_a_key_part(left: str, right: str) -> None:
    assert (key_part(left) == key_part(right)) == (left == right)


@given(NAMES, NAMES, st.integers(0, 1 << 40), st.integers(0, 1 << 32), st.integers(0, 1 << 32))
def test_any_key_is_read_back_and_makes_a_path_below_its_folder(
    udf: str, column: str, fragment: int, start: int, end: int
) -> None:
    identity = replace(IDENTITY, udf=udf, column=column)
    place = fragment_key(identity, fragment)
    for key, span in ((str(place), None), (place.range(start, end), (start, end))):
        parsed = parse_key(key)
        assert parsed is not None
        assert (parsed.fragment, parsed.range) == (place, span)
        path = key_to_path(key)
        assert path_to_key(path) == key
        assert os.path.normpath(path) == path
        assert not path.startswith(("/", ".."))
        assert all(len(part.encode()) < 255 for part in path.split("/"))


@pytest.mark.parametrize("name", ["a_where-b", "x_srcfiles-y", "f_frag-1", "r_range-0-9", "../../etc", "a/b", "a\\b"])
def test_a_name_that_looks_like_a_part_of_a_key_or_a_path_stays_a_name(name: str) -> None:
    place = fragment_key(replace(IDENTITY, udf=name, column=name))
    key = place.range(1, 2)
    parsed = parse_key(key)
    assert parsed is not None
    assert parsed.fragment == place
    assert path_to_key(key_to_path(key)) == key
    assert ".." not in key_to_path(key).split("/")


def test_all_ranges_of_a_fragment_lie_in_one_folder() -> None:
    place = fragment_key(IDENTITY)
    folders = {key_to_path(place.range(at, at + 1)).rpartition("/")[0] for at in range(5)}
    assert folders == {key_to_path(str(place)).removesuffix(".lance")}


@pytest.mark.parametrize(
    "text", ["", "ledger.job.1", "udf-a_ver-1", f"p_srcfiles-{md5('x')}_frag-", "p_frag-1_range-1"]
)
def test_other_texts_are_not_taken_for_keys(text: str) -> None:
    assert parse_key(text) is None


def test_names_with_the_signs_of_markers_do_not_meet() -> None:
    one = WorkIdentity("a_ver-b", "c", "y", None, "uri").prefix
    assert one != WorkIdentity("a", "b_ver-c", "y", None, "uri").prefix
