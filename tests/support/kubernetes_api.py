"""A Kubernetes API server over HTTP, whose pods run as processes of this machine, as Spark's image would run them.

It answers what Spark's own client and Airflow's Kubernetes client ask: resources are created, applied, patched, listed,
watched and deleted, and dependents of a deleted owner are deleted, too. There are no nodes, images or networks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyspark

SPARK = Path(pyspark.__file__).parent
KINDS = {
    "pods": "Pod",
    "configmaps": "ConfigMap",
    "services": "Service",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "networkpolicies": "NetworkPolicy",
}
Key = tuple[str, str]


@dataclass
class Cluster:
    """What the API server holds, and the processes of its pods.

    Args:
        folder: where pods have their files and logs.
        environment: of the image, which all pods have.
        entrypoint: returns the command of a pod for its arguments and environment, in place of Spark's image.
        unavailable: the number of requests for a pod that fail next.
        requests: method and path of each request that changes something.
        identities: who made them, by their Authorization header.
    """

    folder: Path
    environment: Mapping[str, str]
    entrypoint: Callable[[list[str], Mapping[str, str]], list[str]] | None = None
    unavailable: int = 0
    url: str = ""
    resources: dict[Key, dict[str, Any]] = field(default_factory=dict)
    gone: dict[Key, dict[str, Any]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    identities: list[str | None] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))

    def pods(self, role: str) -> list[dict[str, Any]]:
        """Pods with a role that there are or were, in the order of their creation."""
        with self.changed:
            found = [pod for (kind, _), pod in [*self.gone.items(), *self.resources.items()] if kind == "pods"]
        found = [pod for pod in found if pod["metadata"]["labels"].get("spark-role") == role]
        return sorted(found, key=lambda pod: int(pod["metadata"]["uid"]))

    def log(self, pod: dict[str, Any]) -> str:
        """What a pod has printed, as `kubectl logs` shows it."""
        return (self.folder / pod["metadata"]["name"] / "log").read_text()

    # What the API server does

    def create(self, kind: str, document: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            metadata = document["metadata"]
            metadata |= {"uid": str(len(self.events) + 1), "creationTimestamp": _now(), "namespace": "spark"}
            document |= {"kind": KINDS[kind], "apiVersion": "v1"}
            self.resources[kind, metadata["name"]] = document
            if kind == "pods":
                document["status"] = {"phase": "Pending", "podIP": "127.0.0.1"}
            self._tell("ADDED", document)
            if kind == "pods":
                threading.Thread(target=self._run, args=(document,), daemon=True).start()
            return document

    def apply(self, kind: str, name: str, document: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            found = self.resources.get((kind, name))
            if found is None:
                return self.create(kind, document)
            _merge(found, document)
            self._tell("MODIFIED", found)
            return found

    def delete(self, kind: str, name: str) -> dict[str, Any] | None:
        with self.changed:
            found = self.resources.pop((kind, name), None)
            if found is None:
                return None
            self.gone[kind, name] = found
            self._tell("DELETED", found)
            uid = found["metadata"]["uid"]
            owned = [
                key
                for key, one in self.resources.items()
                if any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences", ()))
            ]
            if kind == "pods" and name in self.processes:
                _end(self.processes[name])
            for key in owned:
                self.delete(*key)
            return found

    def selected(self, kind: str, query: Mapping[str, list[str]]) -> list[dict[str, Any]]:
        return [one for (of, _), one in self.resources.items() if of == kind and _selects(one, query)]

    def _tell(self, event: str, document: dict[str, Any]) -> None:
        document["metadata"]["resourceVersion"] = str(len(self.events) + 1)
        self.events.append((event, json.loads(json.dumps(document))))
        self.changed.notify_all()

    # What a node does

    def _run(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        folder = self.folder / name
        [container] = pod["spec"]["containers"]
        environment = dict(self.environment) | {
            one["name"]: one["value"] if "value" in one else _field(pod, one) for one in container.get("env", ())
        }
        command = (self.entrypoint or self._entrypoint)(container["args"], environment)
        for path, here in self._mount(pod, folder).items():
            environment = {key: value.replace(path, here) for key, value in environment.items()}
            command = [word.replace(path, here) for word in command]
        with (folder / "log").open("wb") as log, self.changed:
            if ("pods", name) not in self.resources:
                return
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True
            )
            self.processes[name] = process
            self._say(pod, "Running", {"running": {"startedAt": _now()}})
        code = process.wait()
        ended = {"exitCode": abs(code), "reason": "Completed" if code == 0 else "Error", "finishedAt": _now()}
        with self.changed:
            self._say(pod, "Failed" if code else "Succeeded", {"terminated": {"startedAt": _now(), **ended}})

    def _say(self, pod: dict[str, Any], phase: str, state: dict[str, Any]) -> None:
        [container] = pod["spec"]["containers"]
        told = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0, "ready": True}
        pod["status"] |= {"phase": phase, "containerStatuses": [{**told, "state": state}], "startTime": _now()}
        if ("pods", pod["metadata"]["name"]) in self.resources:
            self._tell("MODIFIED", pod)

    def _mount(self, pod: dict[str, Any], folder: Path) -> dict[str, str]:
        """Make folders for the pod's volumes, and return them by their paths in the pod."""
        volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
        mounted = {}
        for mount in pod["spec"]["containers"][0]["volumeMounts"]:
            here = folder / mount["name"]
            here.mkdir(parents=True)
            mounted[mount["mountPath"]] = str(here)
            if "configMap" not in volumes[mount["name"]]:
                continue
            key = ("configmaps", volumes[mount["name"]]["configMap"]["name"])
            with self.changed:  # Spark creates the pod before what it mounts; a node waits for it
                assert self.changed.wait_for(lambda: key in self.resources, 60)  # noqa: B023
                files = dict(self.resources[key]["data"])
            for file, text in files.items():
                (here / file).write_text(text)
        return mounted

    def _entrypoint(self, arguments: list[str], environment: Mapping[str, str]) -> list[str]:
        """What `entrypoint.sh` of Spark's image starts; addresses stand for the names that a cluster resolves."""
        role, *arguments = arguments
        if role == "driver":
            here = {
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.host": "127.0.0.1",
                "spark.driver.port": "0",
                "spark.driver.blockManager.port": "0",
                "spark.kubernetes.driver.master": self.url,
                "spark.executorEnv.SPARK_DRIVER_POD_IP": "127.0.0.1",
            }
            settings = [word for setting in here.items() for word in ("--conf", "=".join(setting))]
            return [str(SPARK / "bin" / "spark-submit"), *settings, "--deploy-mode", "client", *arguments]
        options = [
            environment[name]
            for name in sorted(environment, key=lambda name: (len(name), name))
            if name.startswith("SPARK_JAVA_OPT_")
        ]
        memory = environment["SPARK_EXECUTOR_MEMORY"]
        named = {
            "driver-url": "SPARK_DRIVER_URL",
            "executor-id": "SPARK_EXECUTOR_ID",
            "cores": "SPARK_EXECUTOR_CORES",
            "app-id": "SPARK_APPLICATION_ID",
            "hostname": "SPARK_EXECUTOR_POD_IP",
            "resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
            "podName": "SPARK_EXECUTOR_POD_NAME",
        }
        backend = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
        told = [word for name, variable in named.items() for word in (f"--{name}", environment[variable])]
        java = [f"{environment['JAVA_HOME']}/bin/java", *options, f"-Xms{memory}", f"-Xmx{memory}"]
        return [*java, "-cp", str(SPARK / "jars" / "*"), backend, *told]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def do_GET(self) -> None:
        kind, name, query = self._path()
        if self.headers.get("Upgrade"):  # a watch is answered by HTTP; Spark's client asks again
            return self._answer(200, {})
        if query.get("watch") == ["true"] or query.get("watch") == ["1"]:
            return self._watch(kind, query)
        with self.cluster.changed:
            if name is not None and self.cluster.unavailable:
                self.cluster.unavailable -= 1
                return self._answer(500, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 500})
            if name is not None:
                return self._found(self.cluster.resources.get((kind, name)))
            items = self.cluster.selected(kind, query)
            version = str(len(self.cluster.events))
            listed = {"kind": f"{KINDS[kind]}List", "apiVersion": "v1", "metadata": {"resourceVersion": version}}
            self._answer(200, {**listed, "items": items})
        return None

    def do_POST(self) -> None:
        kind, _, _ = self._path()
        self._answer(201, self.cluster.create(kind, self._body()))

    def do_PUT(self) -> None:
        self.do_PATCH()

    def do_PATCH(self) -> None:
        kind, name, _ = self._path()
        assert name is not None
        document = self._body()
        if isinstance(document, list):  # a JSON patch, of which Spark's driver sends only labels
            document = _of_patch(document)
        self._answer(200, self.cluster.apply(kind, name, document))

    def do_DELETE(self) -> None:
        kind, name, query = self._path()
        self._body()
        if name is not None:
            return self._found(self.cluster.delete(kind, name))
        with self.cluster.changed:
            for one in self.cluster.selected(kind, query):
                self.cluster.delete(kind, one["metadata"]["name"])
        self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})
        return None

    def _watch(self, kind: str, query: Mapping[str, list[str]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        told = int(query.get("resourceVersion", ["0"])[0] or 0)
        until = time.monotonic() + float(query.get("timeoutSeconds", ["3600"])[0])
        while time.monotonic() < until:
            with self.cluster.changed:
                self.cluster.changed.wait_for(lambda: len(self.cluster.events) > told, 1)  # noqa: B023
                new = self.cluster.events[told:]
                told += len(new)
            for event, document in new:
                if document["kind"] == KINDS[kind] and _selects(document, query):
                    line = json.dumps({"type": event, "object": document}).encode() + b"\n"
                    self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _path(self) -> tuple[str, str | None, Mapping[str, list[str]]]:
        if self.command != "GET":
            self.cluster.requests.append((self.command, urlsplit(self.path).path))
            self.cluster.identities.append(self.headers.get("Authorization"))
        split = urlsplit(self.path)
        words = split.path.strip("/").split("/")
        # /api/v1/namespaces/NAMESPACE/KIND/NAME; Airflow's client, too, always names its namespace
        kind, *name = words[words.index("namespaces") + 2 :]
        return kind, name[0] if name else None, parse_qs(split.query)

    def _body(self) -> Any:
        length = int(self.headers.get("Content-Length") or 0)
        return json.loads(self.rfile.read(length) or b"{}")

    def _found(self, document: dict[str, Any] | None) -> None:
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self._answer(404 if document is None else 200, missing if document is None else document)

    def _answer(self, code: int, document: dict[str, Any]) -> None:
        with self.cluster.changed:
            data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            super().handle()


@contextmanager
def run_cluster(folder: Path, environment: Mapping[str, str]) -> Iterator[Cluster]:
    """Start an API server; at the end its pods are killed.

    Args:
        environment: the variables of Spark's image: PATH, JAVA_HOME, and the Python.
    """
    cluster = Cluster(folder, environment)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": cluster}))
    server.daemon_threads = True
    cluster.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield cluster
    finally:
        for process in cluster.processes.values():
            _end(process, signal.SIGKILL)
        server.shutdown()


def _end(process: subprocess.Popen[bytes], how: int = signal.SIGTERM) -> None:
    if process.poll() is None:
        os.killpg(process.pid, how)


def _field(pod: dict[str, Any], variable: dict[str, Any]) -> str:
    value: Any = pod
    for name in variable["valueFrom"]["fieldRef"]["fieldPath"].split("."):
        value = value[name]
    return str(value)


def _selects(document: dict[str, Any], query: Mapping[str, list[str]]) -> bool:
    labels = document["metadata"].get("labels", {})
    wanted = query.get("labelSelector", [""])[0]
    for part in filter(None, wanted.split(",")):
        name, _, value = part.partition("=")
        if name.endswith("!"):
            if labels.get(name.removesuffix("!")) == value:
                return False
        elif part.startswith("!"):
            if part.removeprefix("!") in labels:
                return False
        elif labels.get(name) != value:
            return False
    field_wanted = query.get("fieldSelector", [""])[0]
    return not field_wanted or document["metadata"]["name"] == field_wanted.partition("=")[2]


def _merge(into: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def _of_patch(steps: list[dict[str, Any]]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for step in steps:
        *folders, last = step["path"].strip("/").split("/")
        place = changes
        for name in folders:
            place = place.setdefault(name, {})
        place[last] = step["value"]
    return changes


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
