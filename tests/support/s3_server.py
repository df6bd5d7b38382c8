"""An S3 server, SeaweedFS, in the current folder and on free ports of 127.0.0.1, with its catalog of Lance tables.

It prints the ports of both when it answers, and ends with its standard input, so that it does not outlive a test
process that is killed.
"""

from __future__ import annotations

import glob
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

PARTS = ("master", "volume", "filer", "s3")
WEED = Path(sys.executable).with_name("weed.exe" if sys.platform == "win32" else "weed")


def free_ports() -> dict[str, int]:
    """Return a port for each option of the server, outside of the range that systems use for outgoing connections."""
    ports: dict[str, int] = {}
    for name in [f"{part}.port{kind}" for part in PARTS for kind in ("", ".grpc")] + ["s3.port.lance"]:
        while name not in ports:
            port = random.randrange(10_000, 32_000)
            try:
                socket.create_server(("127.0.0.1", port)).close()
            except OSError:
                continue
            if port not in ports.values():
                ports[name] = port
    return ports


def start(ports: dict[str, int]) -> subprocess.Popen[bytes]:
    places = {"dir": ".", "ip": "127.0.0.1", "ip.bind": "127.0.0.1"}
    files = {"s3.config": "identities.json", "s3.localSocket": "s3.sock", "filer.localSocket": "filer.sock"}
    # Each bucket has its own volume, and a nearly full disk is enough for the tests.
    sizes = {"volume.max": 1000, "master.volumeSizeLimitMB": 1024, "volume.minFreeSpace": "16MiB"}
    # Without peers the master leads at once, and the volume server does not come back 5 s later.
    off = {"master.peers": "none", "s3.port.iceberg": 0, "master.telemetry": "false"}
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


def is_up(ports: dict[str, int]) -> bool:
    """Whether the server has a writable volume, and answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{ports['master.port']}/dir/assign", timeout=10) as answer:
            placed = "fid" in json.load(answer)
        socket.create_connection(("127.0.0.1", ports["s3.port"]), 10).close()
    except OSError:
        return False
    return placed


def main(key: str, secret: str) -> None:
    # A write of an administrator would create a bucket that does not exist.
    rights = {key: ["Read", "Write", "List", "Tagging"], f"{key}-of-administrator": ["Admin"]}
    identities = [
        {"name": name, "credentials": [{"accessKey": name, "secretKey": secret}], "actions": actions}
        for name, actions in rights.items()
    ]
    Path("identities.json").write_text(json.dumps({"identities": identities}))
    ports = free_ports()
    server = start(ports)
    try:
        while not is_up(ports):
            if server.poll() is not None:
                return
            time.sleep(0.1)
        print(ports["s3.port"], ports["s3.port.lance"], flush=True)
        sys.stdin.read()
    finally:
        server.kill()  # it would take 25 s to end
        server.wait()
        for port in ports.values():
            for left in glob.glob(f"/tmp/seaweedfs-*-grpc-{port}.sock"):
                Path(left).unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
