"""An S3 server of its own folder, SeaweedFS, on free ports of 127.0.0.1: it prints its port and that of its metrics.

It ends with its standard input, so that it does not outlive a test process that is killed.
"""

from __future__ import annotations

import glob
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

PARTS = ("master", "volume", "filer", "s3")
WEED = Path(sys.executable).with_name("weed")


def free_ports() -> dict[str, int]:
    """Return a port by option of the server."""
    names = ["metricsPort", *(f"{part}.port{kind}" for part in PARTS for kind in ("", ".grpc"))]
    probes = {name: socket.create_server(("127.0.0.1", 0)) for name in names}
    ports = {name: probe.getsockname()[1] for name, probe in probes.items()}
    for probe in probes.values():
        probe.close()
    return ports


def start(ports: dict[str, int]) -> subprocess.Popen[bytes]:
    places = {"dir": ".", "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "metricsIp": "127.0.0.1"}
    files = {"s3.config": "identities.json", "s3.localSocket": "s3.sock", "filer.localSocket": "filer.sock"}
    sizes = {"volume.max": 0, "master.volumeSizeLimitMB": 1024}
    off = {"s3.port.iceberg": 0, "s3.port.lance": 0, "master.telemetry": "false"}
    options = {**places, **files, **sizes, **off, **ports}
    command = [
        str(WEED),
        "-logtostderr=true",
        "server",
        "-s3",
        *(f"-{name}={value}" for name, value in options.items()),
    ]
    # A bucket has one volume, not seven, whose files take seconds to make.
    environment = {**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
    with Path("server.log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def is_up(port: int, key: str, secret: str) -> bool:
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 1}, read_timeout=10),
    )
    try:
        client.create_bucket(Bucket="first")
        client.put_object(Bucket="first", Key="first", Body=b"")
    except (BotoCoreError, ClientError):
        return False
    return True


def main(key: str, secret: str) -> None:
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": key, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    Path("identities.json").write_text(json.dumps({"identities": [identity]}))
    ports = free_ports()
    server = start(ports)
    try:
        while not is_up(ports["s3.port"], key, secret):
            if server.poll() is not None:
                raise SystemExit(Path("server.log").read_text()[-4_000:])
            time.sleep(0.1)
        print(ports["s3.port"], ports["metricsPort"], flush=True)
        sys.stdin.read()
    finally:
        server.kill()  # it would take 25 s to end
        server.wait()
        for port in ports.values():
            for left in glob.glob(f"/tmp/seaweedfs-*-grpc-{port}.sock"):
                Path(left).unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
