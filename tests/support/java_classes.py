"""Start the JVMs of tests faster: without long-term optimizations, and with Spark's classes from an archive.

Spark starts in 5 s instead of 7 s with the archive, which Java writes in 15 s.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# No JVM of a test lives long enough for its second compiler and its parallel collector to be worth their time, and
# Spark's classes need no verification. A Java that cannot use the archive is not to print so.
JAVA_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote "
    "-Xlog:disable"
)

_PROGRAM = """
import os, subprocess, sys
from pyspark.sql import SparkSession
if sys.argv[1:]:
    session = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
else:
    session = SparkSession.builder.getOrCreate()
    server = getattr(session._jvm.org.apache.spark.sql.connect.service, "SparkConnectService$")
    url = f"sc://127.0.0.1:{getattr(server, 'MODULE$').localPort()}"
    os.environ.pop("MASTER")  # of spark-submit; a client has none
    subprocess.run([sys.executable, __file__, url], check=True)
session.range(0, 2, 1, 2).mapInArrow(lambda batches: batches, "id long").collect()
session.stop()
"""


@contextmanager
def archive_classes(archive: Path) -> Iterator[None]:
    """Let Java write the class archive of a Spark session and a Connect server in the background, unless another
    process does.

    A JVM ignores an archive that is missing, or that was written for another class path, such as one with a folder of
    Spark settings.
    """
    program = archive.with_suffix(".py")
    try:
        with program.open("x") as out:
            out.write(_PROGRAM)
    except FileExistsError:
        yield
        return
    unfinished = archive.with_suffix(".new")
    settings = {
        "master": "local[1]",
        "plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "connect.grpc.binding.port": "0",
        "ui.enabled": "false",
        "sql.warehouse.dir": str(archive.with_suffix(".warehouse")),
    }
    options = " ".join(f"--conf spark.{name}={value}" for name, value in settings.items())
    process = subprocess.Popen(
        ["/bin/sh", "-c", f"spark-submit {options} {program} && mv {unfinished} {archive}"],
        env={**os.environ, "SPARK_SUBMIT_OPTS": f"{JAVA_OPTIONS} -XX:ArchiveClassesAtExit={unfinished}"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    yield
    process.terminate()
    process.wait()
