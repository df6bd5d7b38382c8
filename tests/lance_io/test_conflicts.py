"""How often a commit is tried again: what the environment says, else the block around it, else ten times."""

from __future__ import annotations

import pytest

from airflow_geneva.engine.lance_io.conflicts import VARIABLE, conflict_retries, max_retries
from airflow_geneva.errors import InvalidInput


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_a_block_says_how_often_until_it_ends() -> None:
    assert max_retries() == 10
    with conflict_retries(3):
        with conflict_retries(0):
            assert max_retries() == 0
        assert max_retries() == 3
    assert max_retries() == 10


@pytest.mark.parametrize(("text", "expected"), [("0", 0), (" 7 ", 7), ("", 3)])
def test_the_environment_goes_first_where_it_says_something(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: int
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with conflict_retries(3):
        assert max_retries() == expected


@pytest.mark.parametrize("text", ["often", "-1", "2.5"])
def test_what_makes_no_sense_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(InvalidInput, match=f"{VARIABLE}='{text}' is not valid: set it to a whole number"):
        max_retries()
