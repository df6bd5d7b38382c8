"""Secrets that the process holds are masked by their values, wherever they stand in a message."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import re
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

import airflow_geneva
from airflow_geneva import connect
from airflow_geneva.engine import masking
from airflow_geneva.engine.masking import LOGGERS, mask_secrets, remember_secrets
from airflow_geneva.engine.storage.catalogs import catalog_option
from airflow_geneva.engine.storage.files import freeze_options
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.secrets import CATALOG
from airflow_geneva.errors import StorageError
from tests.support.processes import as_another_process

PACKAGE = Path(airflow_geneva.__file__).parent
SECRET = "pl4nted/se+cret=&'\"\\x"


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    as_another_process()


FORMS = {
    "as it is": SECRET,
    "in a path": quote(SECRET),
    "in a query": quote_plus(SECRET),
    "as a part of a path": quote(SECRET, safe=""),
    "in JSON": json.dumps(SECRET)[1:-1],
    "in a repr": repr(SECRET)[1:-1],
    "in base64": base64.b64encode(SECRET.encode()).decode(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_masked_in_each_form_in_which_a_message_may_hold_it(form: str) -> None:
    connect("s3://bucket/db", {"aws_secret_access_key": SECRET, "region": "eu-west-1"})
    text = f"The store at eu-west-1 said <{FORMS[form]}> about it"
    assert mask_secrets(text) == str(StorageError(text)) == "The store at eu-west-1 said <***> about it"


# Options and a part of their values that must not be shown.
OPTIONS: dict[str, tuple[dict[str, str], str]] = {
    "a key": ({"aws_secret_access_key": "abcdefgh12"}, "abcdefgh12"),
    "a session token": ({"aws_session_token": "FwoGZXIvYXdz"}, "FwoGZXIvYXdz"),
    "a key of Azure": ({"azure_storage_account_key": "kkkk1234kkkk=="}, "kkkk1234kkkk=="),
    "an option that nobody knows": ({"new_store_credential": "v3ry-new-one"}, "v3ry-new-one"),
    "a password in a URL": ({"aws_endpoint": "http://me:pa55word@store"}, "pa55word"),
    "a property of a catalog": (
        {CATALOG: catalog_option("rest", {"uri": "https://c.example", "headers.Authorization": "Bearer t0ken-of-it"})},
        "t0ken-of-it",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_secret_of_storage_options_is_masked_by_its_value(name: str) -> None:
    options, secret = OPTIONS[name]
    freeze_options(options)
    assert mask_secrets(f"denied: {secret!r}") == "denied: '***'"


def test_a_process_that_unpickles_options_masks_them_once_it_opens_something(tmp_path: Path) -> None:
    location = TableLocation(str(tmp_path / "t.lance"), "t", (("aws_secret_access_key", "unp1ckled-secret"),))
    sent = pickle.dumps(location)
    as_another_process()
    received: TableLocation = pickle.loads(sent)
    assert received.access
    assert mask_secrets("unp1ckled-secret") == "***"


ENVIRONMENT = {
    "AWS_SECRET_ACCESS_KEY": "abcd1234efgh",
    "AWS_ACCESS_KEY_ID": "AKIXYZ123456",
    "HF_TOKEN": "t0k-en-of-it",
    "POSTGRES_PASSWORD": "hunter2-hunter2",
    "OPENAI_API_KEY_VOYAGE": "voyage-12345",
    "AIRFLOW__CORE__FERNET_KEY": "f3rnet-f3rnet=",
    "AIRFLOW_CONN_STORE": "aws://me:p%40ss-w0rd@",
    "AIRFLOW_CONN_OTHER": json.dumps({"conn_type": "lance", "password": "p@ss-w0rd"}),
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "postgresql://airflow:p%40ss-w0rd@db/airflow",
}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_secrets_of_the_environment_are_masked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = ENVIRONMENT[name]
    monkeypatch.setenv(name, value)
    secret = "p@ss-w0rd" if "ss-w0rd" in value else value
    assert mask_secrets(f"it said: {secret}!") == "it said: ***!"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("POSTGRES_PASSWORD", "airflow"), ("PWD", "/opt/airflow-home-1"), ("SOME_TOKEN", "/run/secrets/token-1"),
        ("AWS_SESSION_TOKEN", ""), ("API_KEY", "12345678"), ("SECRET", "eu-west-1"),
        ("TOKENIZERS_PARALLELISM", "false-1"),
    ],
)  # fmt: skip
def test_ordinary_words_of_the_environment_stay(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert mask_secrets(f"The table in {value} of airflow") == f"The table in {value} of airflow"


@pytest.mark.parametrize("value", ["true", "abcde", "default", "us-east-1", "123456", "STANDARD"])
def test_ordinary_values_of_options_stay(value: str) -> None:
    freeze_options({"an_option_of_tomorrow": value})
    assert mask_secrets(f"It is {value} there") == f"It is {value} there"


@pytest.mark.parametrize(
    "key",
    ["sk-planted-5d1c9a", "sk-proj-Ab12Cd34Ef56Gh78_x-y", "hf_abcdefghijklmnopqrstuvw", "ghp_abcdefghijklmnopqrst12",
     "AKIAIOSFODNN7EXAMPLE", "xoxb-1234567890-abc"],
)  # fmt: skip
def test_a_bare_key_is_masked_by_its_form(key: str) -> None:
    assert mask_secrets(f"Incorrect key {key}, try another") == "Incorrect key ***, try another"
    assert mask_secrets("task-sk-learn and sk-learn-estimators") == "task-sk-learn and sk-learn-estimators"


def test_the_environment_is_looked_through_again_only_after_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    look = masking._secrets_of_environment
    monkeypatch.setattr(masking, "_secrets_of_environment", lambda: (looked.append(1), look())[1])
    for value in ("the-first-key", "the-second-key", ""):
        if value:
            monkeypatch.setenv("MY_API_KEY", value)
        else:
            monkeypatch.delenv("MY_API_KEY")
        looked.clear()
        assert [mask_secrets(f"at {value or 'the-second-key'}!") for _ in range(3)] == [
            "at ***!" if value else "at the-second-key!"
        ] * 3
        assert len(looked) == 1


def test_only_the_newest_secrets_are_kept() -> None:
    remember_secrets(f"secret-{at:04}" for at in range(600))
    assert mask_secrets("secret-0000 secret-0599") == "secret-0000 ***"


def test_every_logger_of_the_package_masks_what_others_raised(caplog: pytest.LogCaptureFixture) -> None:
    named = {name for file in PACKAGE.rglob("*.py") for name in re.findall(r"getLogger\((.*?)\)", file.read_text())}
    assert named - {'"py4j"', 'f"airflow_geneva.{_name}"'} == {f'"airflow_geneva.{name}"' for name in LOGGERS}
    remember_secrets(["pl4nted-secret"])
    for name in LOGGERS:
        logging.getLogger(f"airflow_geneva.{name}").warning("Cannot write %s: %s", "it", OSError("pl4nted-secret"))
        logging.getLogger(f"airflow_geneva.{name}").warning("100 % of pl4nted-secret")
    assert caplog.messages == ["Cannot write it: ***", "100 % of ***"] * len(LOGGERS)
