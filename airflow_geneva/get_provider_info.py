"""The provider's description for Airflow."""

from __future__ import annotations

from typing import Any

from airflow_geneva.engine.choices import OnPartial


def _modules(*paths: str) -> list[dict[str, Any]]:
    return [{"integration-name": "Lance", "python-modules": [f"airflow_geneva.{path}" for path in paths]}]


def _option(default: str, example: str, description: str, kind: str = "integer") -> dict[str, str]:
    return {
        "description": description,
        "version_added": "0.1.0",
        "type": kind,
        "example": example,
        "default": default,
    }


def get_provider_info() -> dict[str, Any]:
    """Describe the provider in the form of Airflow's `provider_info.schema.json`.

    Airflow calls this while it starts, so it imports nothing.
    """
    return {
        "package-name": "airflow-geneva",
        "name": "Geneva",
        "description": "Keeps computed columns and materialized views of Lance tables up to date on Spark.",
        "integrations": [{"integration-name": "Lance", "external-doc-url": "https://lance.org/", "tags": ["software"]}],
        "operators": _modules(
            "operators.application",
            "operators.apply",
            "operators.approve",
            "operators.cleanup",
            "operators.columns",
            "operators.commit",
            "operators.finish",
            "operators.plan",
            "operators.plan_load",
            "operators.plan_refresh",
            "operators.promote",
            "operators.refresh_database",
            "operators.views",
        ),
        "sensors": _modules("sensors.new_fragments"),
        "triggers": _modules("triggers.new_fragments"),
        "hooks": _modules("hooks.lance", "hooks.openai"),
        "asset-uris": [
            {
                "schemes": ["lance"],
                "handler": None,
                "factory": "airflow_geneva.assets.lance_asset",
                "to_openlineage_converter": "airflow_geneva.assets.to_openlineage",
            }
        ],
        "extra-links": ["airflow_geneva.links.job.JobLink"],
        "plugins": [{"name": "geneva", "plugin-class": "airflow_geneva.plugin.GenevaPlugin"}],
        "config": {
            "geneva": {
                "description": (
                    "Defaults of backfills and refreshes. Arguments in the DAG and environment variables go first. "
                    "Read by each task when it starts, on its worker."
                ),
                "options": {
                    "inline_below_seconds": _option(
                        "10",
                        "0",
                        "A job that takes fewer seconds in one process is computed by its ``plan`` task, without "
                        "Spark. The time is estimated from an earlier job of the same UDF version; a version without "
                        "one goes to Spark, as do UDFs that ask for GPUs or memory. With 0 the ``plan`` task "
                        "computes nothing.",
                    ),
                    "inline_below_rows": _option(
                        "0",
                        "1000",
                        "A shard with fewer rows to run is computed in its ``apply`` task, without Spark. "
                        "A task's own ``inline_below_rows`` overrides it; with 0 every shard goes to Spark.",
                    ),
                    "concurrency": _option(
                        "8",
                        "32",
                        "Task slots that one spark-submit requests from the cluster. "
                        "A task's own ``concurrency`` overrides it.",
                    ),
                    "version_conflict_max_retries": _option(
                        "10",
                        "30",
                        "How often a task retries a commit that conflicts with other writers, before it fails. "
                        "The environment variable ``GENEVA_VERSION_CONFLICT_MAX_RETRIES`` overrides it, and also "
                        "applies without Airflow.",
                    ),
                    "task_memory_bytes": _option(
                        "134217728",
                        "67108864",
                        "Bytes of rows that a task slot holds at a time. It limits what the task reads, computes, "
                        "assembles and buffers for a checkpoint. The plan task stores it in the plan. "
                        "The environment variable ``GENEVA_TASK_MEMORY_BYTES`` overrides it, and also applies "
                        "without Airflow.",
                    ),
                    "price_per_slot_hour": _option(
                        "0",
                        "0.05",
                        "What a Spark task slot costs in an hour, in any currency, for the estimate in a plan and for "
                        "``max_cost``. With 0 it is not known. Without Airflow, give it to ``plan_backfill``, "
                        "``backfill`` and ``refresh``.",
                        "float",
                    ),
                    "on_partial": _option(
                        "warn",
                        "fail",
                        "What ``finish`` does when a job is PARTIAL, because rows are left for the next run. "
                        f"{OnPartial.explained()}. A task's own ``on_partial`` overrides it.",
                        "string",
                    ),
                    "udf_modules": _option(
                        "airflow_geneva.functions",
                        "my_project.models, my_project.prompts",
                        "Modules and packages, separated by commas, whose functions make UDFs. A UDF that a table "
                        "names by its import path is imported if its module decorates it with ``@udf``, or makes it "
                        "with a function of one of these modules or of ``airflow_geneva.functions``.",
                        "string",
                    ),
                    "allowed_places": _option(
                        "",
                        "s3://bucket/photos, s3://archive",
                        "Folders, separated by commas, in which tables of all Lance connections may name files, beside "
                        "those of their own database: blobs that lie elsewhere, and the files of cloned tables. A "
                        "connection's own ``allowed_places``, in its extra, are added. Everywhere else, a file that "
                        "a table names is not opened.",
                        "string",
                    ),
                    "store_patience": _option(
                        "300",
                        "900",
                        "For how many seconds a task waits for an object store that does not answer, before it fails. "
                        "The task's ``execution_timeout`` ends it earlier. Storage options ``client_max_retries`` and "
                        "``client_retry_timeout`` replace it for the requests that pylance makes itself. With 0 a "
                        "task does not wait.",
                        "integer",
                    ),
                },
            }
        },
        "connection-types": [
            {
                "connection-type": "lance",
                "hook-class-name": "airflow_geneva.hooks.lance.LanceHook",
                "hook-name": "Lance",
                "ui-field-behaviour": {
                    "hidden-fields": ["schema", "login", "password", "port", "extra"],
                    "relabeling": {"host": "Database URI"},
                    "placeholders": {"host": "s3://bucket/database or /path/to/database"},
                },
                "conn-fields": {
                    "storage_options": {
                        "label": "Storage options",
                        "description": (
                            "Options of the object store as a JSON object of strings, "
                            'for example {"aws_region": "eu-west-1", "aws_endpoint": "https://minio:9000"}. '
                            "Leave empty to use the identity of the machine."
                        ),
                        "schema": {"type": ["object", "null"]},
                    },
                    "allowed_places": {
                        "label": "Allowed places",
                        "description": (
                            "Folders outside of the database in which its tables may name files, as a JSON list such "
                            'as ["s3://bucket/photos"]: blobs that lie elsewhere, what read_file reads, and the files '
                            'of cloned tables. {"s3://other/scans": "scans_s3"} also names the connection of each, or '
                            "null."
                        ),
                        "schema": {"type": ["array", "object", "null"]},
                    },
                    "namespace": {
                        "label": "Catalog",
                        "description": (
                            "For tables that a catalog names, instead of a database URI: a JSON object such as "
                            '{"impl": "rest", "properties": {"uri": "https://catalog.example"}}, as connect_namespace '
                            "takes it."
                        ),
                        "schema": {"type": ["object", "null"]},
                    },
                },
            }
        ],
    }
