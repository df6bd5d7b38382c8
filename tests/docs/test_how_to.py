"""What the how-to pages show runs, and what they say about settings is what is set."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
from lance.namespace import RestAdapter
from lance_namespace import CreateNamespaceRequest

from airflow_geneva import connect, connect_namespace, expect, udf
from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from airflow_geneva.errors import JobFailed
from airflow_geneva.spark.submit import Resources, SparkMaster
from tests.support.object_store import KEY, SECRET, Bucket
from tests.support.openai_server import OpenAIServer, embedding_of

DOCS = Path(__file__).parents[2] / "docs"
CONNECTIONS = [
    (f"{page.stem} {name}", document)
    for page in sorted(DOCS.rglob("*.md"))
    for text in [page.read_text().replace("'\"$HOME\"'", "/home/me")]
    for name, document in re.findall(r"AIRFLOW_CONN_(\w+)='(\{.*?\})'$", text, re.MULTILINE | re.DOTALL)
]


def run(name: str) -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "snippets" / f"{name}.py"))


def test_the_snippet_about_some_rows_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = run("selective")
    assert left["r"].rows_computed == 2
    assert left["table"].to_arrow().column("n").to_pylist() == [1, 2, 3, 4, 5, None]


def test_the_snippet_about_groups_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(DOCS / "snippets"))
    left = run("groups")
    assert left["r"].rows_run == 1
    rows = {1: (2, 3, "visit buy: 3.5"), 2: (2, 5, "buy buy: 6")}
    found = left["profiles"].to_arrow().to_pylist()
    assert {row["customer"]: (row["n"], row["last"], row["profile"]) for row in found} == rows
    assert left["means"].to_arrow().sort_by("customer").to_pydict() == {
        "customer": [1, 2, None],
        "mean": [5.25, 3.0, None],
    }
    assert (left["r"].usage.folds.folded, left["r"].rows_computed) == (1, 1)


def test_the_snippet_about_links_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, name in (("scans", "2.png"), ("web", "1.png")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(b"x" * len(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path / "web"))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("WEB", f"http://127.0.0.1:{server.server_port}")
        left = run("links")
        server.shutdown()
        thread.join()
    found = left["table"].to_arrow()
    assert found.column("size").to_pylist() == [3, 5, None]
    assert found.column("file").to_pylist() == [b"xxx", b"xxxxx", None]
    [failing] = left["table"].group_errors(column_name="size")
    assert "missing.png answered 404" in failing.message


@pytest.mark.airflow
def test_the_dag_about_links_maps_the_column_and_asks_for_failed_rows_when_it_is_triggered() -> None:
    dag = run("links_dag")["dag"]
    assert dag.get_task("define").columns == {"size": ("photo_udfs:size", ["link"])}
    assert dag.get_task("backfill.plan").errors_only == "{{ params.errors_only }}"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_the_functions_people_use_have_right_values(tmp_path: Path) -> None:
    from dags_examples.file_udfs import frames, kind_of, language_of

    made = io.BytesIO()
    with av.open(made, "w", format="matroska") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for shade in range(50):
            pixels = np.full((32, 32, 3), 5 * shade, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    pixel = io.BytesIO()
    PIL.Image.new("RGB", (1, 1)).save(pixel, "png")
    files = {
        "film": made.getvalue(),
        "notes.txt": pixel.getvalue(),
        "picture.png": (b"import os\nprint(os.getcwd())\n") * 20,
    }
    db = connect(tmp_path / "db")
    (tmp_path / "db").mkdir()
    for name, content in files.items():
        (tmp_path / "db" / name).write_bytes(content)
    texts = ["Todos los seres humanos nacen libres e iguales.", "All human beings are born free and equal.", ""]
    rows = {"uri": [f"{tmp_path}/db/{name}" for name in files], "text": texts, "file": list(files.values())}
    table = db.create_table("files", pa.table(rows))
    table.add_columns({"kind": (kind_of, ["uri"]), "language": (language_of, ["text"]), "frames": (frames, ["file"])})
    for column in ("kind", "language", "frames"):
        table.backfill(column, runner="inline")
    found = table.to_arrow()
    assert [one["label"] for one in found.column("kind").to_pylist()] == ["mkv", "png", "python"]
    assert found.column("language").to_pylist() == ["es", "en", None]
    of_film, of_picture, of_code = found.column("frames").to_pylist()
    assert [frame["at"] for frame in of_film] == [0, 10, 20]
    shades = [np.asarray(PIL.Image.open(io.BytesIO(frame["image"]))).mean() for frame in of_film]
    assert shades == pytest.approx([0, 100, 200], abs=8)
    assert (len(of_picture), of_code) == (1, None)


def test_the_snippet_about_a_catalog_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RestAdapter("dir", {"root": str(tmp_path / "catalog")}, port=0) as server:
        monkeypatch.setenv("CATALOG_URL", f"http://127.0.0.1:{server.port}")
        monkeypatch.setenv("CATALOG_TOKEN", "token")
        made = connect_namespace("rest", {"uri": f"http://127.0.0.1:{server.port}"})
        made.lance.create_namespace(CreateNamespaceRequest(id=["prod"]))
        left = run("catalogs")
        assert left["table"].to_arrow()["n"].to_pylist() == [1, 2]
        assert left["db"].table_names(namespace=["prod"]) == ["prod.docs"]
        assert left["view"].to_arrow()["n"].to_pylist() == [2]


def test_the_snippet_about_changing_a_model_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    left = run("change_model")
    assert (left["found"], left["before"]) == (["Three eggs"], ["seventeen"])
    assert left["search"].embed("ab ce") == [5.0, 1.0]
    shown = capsys.readouterr().out
    assert "nearest neighbors are the same, of 2 queries, by their indexes" in shown
    assert "candidate 'embedding_v2': 3 rows, 0 due, 0 failed" in shown


LEFT_OUT = (
    "[{'row_id': 0, 'cluster': 0, 'duplicate_of': None, 'id': 1}, "
    "{'row_id': 1, 'cluster': 0, 'duplicate_of': 0, 'id': 2}]"
)


def test_the_snippet_about_duplicates_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run("duplicates")
    assert capsys.readouterr().out.splitlines() == ["[1, 3, 4]", LEFT_OUT, "[1, 2, 4]", "[1, 3]"]


def test_the_snippet_about_costs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    left = run("costs")
    assert (left["result"].state, left["result"].rows_computed) == ("DONE", 12)
    shown = capsys.readouterr().out
    assert "text='ccc', n=3" in shown
    assert "by an earlier job of this version" in shown


def test_the_snippet_about_models_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with OpenAIServer() as server:
        monkeypatch.setenv("EMBEDDING_URL", server.base_url)
        monkeypatch.setenv("EMBEDDING_API_KEY", "any")
        left = run("call_a_model")
        assert (left["result"].rows_computed, left["of_batch"].rows_computed) == (60, 60)
        assert server.counts().rows == 120


def test_the_script_without_a_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"text {at}" for at in range(200)]
    given, taken = tmp_path / "texts.json", tmp_path / "vectors.json"
    given.write_text(json.dumps(texts))
    with OpenAIServer(fail_inputs={"text 70": ["500", 1], "text 150": ["429", 1]}, retry_after=0.1) as server:
        for name, value in {
            "OPENAI_API_KEY": "any",
            "OPENAI_BASE_URL": server.base_url,
            "TOKENS_PER_MINUTE": "600000",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["plain_embeddings.py", str(given), str(taken)])
        run("plain_embeddings")
        assert server.counts().rows == 200
    assert json.loads(taken.read_text()) == [embedding_of(text) for text in texts]


def test_the_snippet_about_limits_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with OpenAIServer() as server:
        monkeypatch.setenv("EMBEDDING_URL", server.base_url)
        monkeypatch.setenv("EMBEDDING_API_KEY", "key")
        result = run("limits")["result"]
        counts = server.counts()
    assert (result.rows_computed, result.usage.calls, result.usage.tokens) == (100, counts.requests, counts.tokens)


def test_the_snippet_about_paying_once_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = run("pay_once")
    assert left["calls"] == ["a b", "c", "d e f", "new"]
    assert (left["result"].rows_deduplicated, left["later"].rows_cached) == (2, 1)


def test_the_snippet_about_batches_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with OpenAIServer(batch_seconds=0.2, fail_inputs={"bb": ["500", 1]}) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "any")
        with pytest.raises(JobFailed, match=r"RuntimeError on row \d+ .*The server had an error"):
            run("batch_api")


def test_the_snippet_about_expectations_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = run("expectations")
    assert [one.wrong for one in left["result"].checked] == [0, 0, 0, 1]
    assert [one.wrong for one in left["refreshed"].checked] == [0]


def test_the_snippet_about_search_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("search")["found"]["text"].to_pylist() == ["eleven"]


def test_the_snippet_about_chains_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(DOCS / "snippets"))
    left = run("chains")
    assert left["long_docs"].to_arrow()["id"].to_pylist() == [1, 2]
    assert left["sentences"].to_arrow()["sentence"].to_pylist() == ["One two", "Three", "Four five six"]


def test_the_snippet_about_old_versions_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = run("old_versions")
    assert len(left["dataset"].versions()) == 2, "nothing of today goes"


@pytest.mark.airflow
def test_the_dag_of_all_upkeep_compacts_first_and_cleans_up_last() -> None:
    dag = run("upkeep_dag")["dag"]
    order = [task.task_id for task in dag.topological_sort()]
    kept = ["compact", "update.plan", "update.finish", "remove_old_versions", "clean_up"]
    found = [name.replace("backfill.", "update.") for name in order]
    assert [name for name in found if name in kept] == kept


def test_the_compaction_of_the_upkeep_makes_no_row_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = run("search")["table"]
    table.lance.delete("text = 'one'")
    table.lance.optimize.compact_files()
    result = table.backfill("v", runner="inline", indexes="update")
    assert (result.rows_computed, result.unindexed_rows) == (0, 0)


def test_null_and_nan_are_what_the_page_on_backfills_says(tmp_path: Path) -> None:
    nan, calls = float("nan"), list[float | None]()

    @udf(data_type=pa.float64(), version="1", expect=[expect.between(-1, 1, level="warn")])
    def same(x: float) -> float:
        calls.append(x)
        return x

    rows = {"id": [0, 1, 2, 3], "x": [1.0, None, nan, -0.0]}
    table = connect(tmp_path).create_table("t", rows)
    table.add_columns({"y": same})
    result = table.backfill("y", runner="inline")
    assert (result.rows_computed, calls[1]) == (4, None)
    assert [(one.wrong, [row for row, _ in one.examples]) for one in result.checked] == [(1, [2])]
    for where, ids in {"x > 0": [0, 2], "NOT (x > 0)": [3], "x IS NOT NULL": [0, 2, 3], "isnan(x)": [2]}.items():
        assert table.lance.to_table(columns=["id"], filter=where)["id"].to_pylist() == ids
    calls.clear()
    table.lance.update({"x": "CAST('NaN' AS DOUBLE)"}, where="id = 2")
    table.lance.update({"x": "0.0"}, where="id = 3")
    assert table.backfill("y", runner="inline").rows_computed == 1
    assert calls == [0.0]


def test_the_snippet_about_changed_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = run("changing")
    assert left["computed"] == [1, 3]
    assert left["table"].to_arrow().column("words").to_pylist() == [2, 1, 2, 3]


def test_the_snippet_about_a_failing_function_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = run("failing")
    page = (DOCS / "how-to" / "fix-a-failing-function.md").read_text()
    shown = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert shown
    words = re.escape(" ".join(shown[1].split())).replace(re.escape("..."), ".*")
    assert re.search(words, " ".join(left["message"].split()))
    assert left["left"] == [{"text": "call us", "price": None}]
    assert "Note: checkpointed by UDF version" in str(left["plan"])
    assert (left["r"].rows_computed, left["r"].rows_reused) == (1, 2)


@pytest.mark.slow
def test_the_snippet_about_object_stores_runs(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Bucket(endpoint, "lake")
    for name, value in {"LAKE_KEY": KEY, "LAKE_SECRET": SECRET, "LAKE_ENDPOINT": endpoint}.items():
        monkeypatch.setenv(name, value)
    left = run("object_store")
    assert left["r"].rows_computed == 2
    assert left["table"].uri == "s3://lake/db/docs.lance"


@pytest.mark.airflow
def test_the_dag_about_changed_code_asks_when_it_is_triggered() -> None:
    dag = run("changing_dag")["dag"]
    assert dag.get_task("backfill.plan").on_code_change == "{{ params.on_code_change }}"
    assert dag.params["on_code_change"] == "error"


@pytest.mark.airflow
def test_the_dags_for_a_cluster_hand_on_what_they_are_given() -> None:
    left = run("cluster_dags")
    plan = left["on_gpus"].get_task("backfill.plan")
    assert (plan.udf, plan.sizing["concurrency"]) == ("gpu_udfs:Embed", 4)
    apply = left["on_a_cluster"].get_task("backfill.shards.apply")
    assert apply.conf == {"spark.pyspark.python": "/opt/python/bin/python"}
    in_cluster_mode = left["in_cluster_mode"].get_task("backfill.shards.apply")
    assert in_cluster_mode.conf["spark.kubernetes.file.upload.path"] == "s3a://lake/spark-upload"
    assert left["kubernetes"].items() <= in_cluster_mode.conf.items()
    assert in_cluster_mode._track_driver_via_k8s_api
    on_yarn = left["in_cluster_mode_on_yarn"].get_task("backfill.shards.apply")
    assert (on_yarn._yarn_track_via_rm_api, on_yarn._archives) == (True, left["packed"]["archives"])
    with_packages = left["with_packages"].get_task("backfill.shards.apply")
    assert with_packages._archives == "s3a://lake/packages.zip#packages"
    assert with_packages.conf == {"spark.executorEnv.PYTHONPATH": "packages"}
    assert left["with_history"].get_task("backfill.shards.apply").conf["spark.eventLog.enabled"] == "true"


def test_a_gpu_function_loads_its_model_on_the_gpu_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def __init__(self, name: str, device: str) -> None:
            self.device = device

        def encode(self, texts: list[str], batch_size: int) -> Any:
            assert batch_size == len(texts)
            return np.zeros((len(texts), 384), np.float32)

    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=Model))
    embed = run("gpu_udfs")["Embed"]
    assert embed.function.model.device == "cuda"
    assert embed(pa.array(["a", "b"])).shape == (2, 384)


def test_a_gpu_function_takes_the_pixels_that_its_stage_decodes() -> None:
    features = run("gpu_stages")["Features"]
    assert (features.preprocess_workers, features.num_cpus, features.resolve_inputs()) == (4, 4.0, ("image",))
    file = io.BytesIO()
    PIL.Image.new("RGB", (300, 200), (9, 8, 7)).save(file, "PNG")
    with open_batch_mapper(features.stage) as stage:
        pixels = stage(pa.record_batch({"image": [file.getvalue(), b"no image"]}))
    assert (pixels.values.type, [failure.index for failure in pixels.failures]) == (features.preprocess.data_type, [1])
    assert pixels.values.type == pa.list_(pa.uint8(), 3 * 224 * 224)


@pytest.mark.parametrize(("column", "master"), [(1, "spark://master:7077"), (2, "yarn"), (2, "k8s://https://c:6443")])
def test_the_page_about_gpus_shows_what_is_asked_of_a_cluster(column: int, master: str) -> None:
    embed = run("gpu_udfs")["Embed"]
    asked = Resources(4, embed.num_cpus, embed.num_gpus, embed.memory)
    lines = re.findall(r"^\| (`spark\..+)\|$", (DOCS / "how-to" / "gpu.md").read_text(), re.MULTILINE)
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in lines]
    shown = {row[0]: row[column] for row in rows if row[column]}
    assert asked.settings(SparkMaster.parse(master, "spark_default")) == shown


@pytest.mark.parametrize(("name", "document"), CONNECTIONS, ids=[name for name, _ in CONNECTIONS])
def test_connections_are_json_that_leads_somewhere(name: str, document: str) -> None:
    connection = json.loads(document)
    if connection["conn_type"] == "spark":
        assert SparkMaster.parse(connection["host"], name)
    elif connection["conn_type"] == "spark_connect":
        assert connection["host"].startswith("sc://")
    elif connection["conn_type"] == "openai":
        assert connection["host"].endswith("/v1")
    else:
        assert connection["conn_type"] == "lance"
        if catalog := connection.get("extra", {}).get("namespace"):
            assert connect_namespace(**catalog).uri.startswith("namespace://rest/https://")
        else:
            assert connection["host"].startswith(("/", "s3://"))


def test_connections_are_found() -> None:
    assert len(CONNECTIONS) >= 7, "the commands were damaged"
