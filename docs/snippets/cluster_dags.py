from airflow.sdk import DAG

from airflow_geneva.task_groups import BackfillTaskGroup

with DAG("on_gpus", schedule=None) as on_gpus:
    # --8<-- [start:gpu]
    BackfillTaskGroup(table="docs", column="embedding", udf="gpu_udfs:Embed", concurrency=4)
    # --8<-- [end:gpu]

with DAG("on_a_cluster", schedule=None) as on_a_cluster:
    # --8<-- [start:python]
    BackfillTaskGroup(
        table="docs",
        column="embedding",
        concurrency=32,
        spark_submit={"conf": {"spark.pyspark.python": "/opt/python/bin/python"}},
    )
    # --8<-- [end:python]

with DAG("with_packages", schedule=None) as with_packages:
    # --8<-- [start:packages]
    packages = {
        "archives": "s3a://lake/packages.zip#packages",
        "conf": {"spark.executorEnv.PYTHONPATH": "packages"},
    }
    BackfillTaskGroup(table="docs", column="text", udf="scan_udfs:read_text", spark_submit=packages)
    # --8<-- [end:packages]

with DAG("with_history", schedule=None) as with_history:
    # --8<-- [start:history]
    events = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": "s3a://lake/spark-events"}
    BackfillTaskGroup(table="docs", column="embedding", spark_submit={"conf": events})
    # --8<-- [end:history]

with DAG("on_kubernetes", schedule=None) as on_kubernetes:
    # --8<-- [start:kubernetes]
    kubernetes = {
        "spark.kubernetes.container.image": "registry.internal/spark-with-pylance:4.2.0",
        "spark.kubernetes.authenticate.driver.serviceAccountName": "lake",
        "spark.kubernetes.authenticate.executor.serviceAccountName": "lake",
    }
    BackfillTaskGroup(table="docs", column="embedding", concurrency=32, spark_submit={"conf": kubernetes})
    # --8<-- [end:kubernetes]

with DAG("in_cluster_mode", schedule=None) as in_cluster_mode:
    # --8<-- [start:cluster]
    uploads = {"spark.kubernetes.file.upload.path": "s3a://lake/spark-upload"}
    cluster_mode = {"deploy_mode": "cluster", "track_driver_via_k8s_api": True, "conf": {**kubernetes, **uploads}}
    BackfillTaskGroup(table="docs", column="embedding", concurrency=32, spark_submit=cluster_mode)
    # --8<-- [end:cluster]

with DAG("on_yarn", schedule=None) as on_yarn:
    # --8<-- [start:yarn]
    packed = {
        "archives": "s3a://lake/environment.tar.gz#environment",
        "conf": {"spark.pyspark.python": "environment/bin/python"},
    }
    BackfillTaskGroup(table="docs", column="embedding", concurrency=32, spark_submit=packed)
    # --8<-- [end:yarn]

with DAG("in_cluster_mode_on_yarn", schedule=None) as in_cluster_mode_on_yarn:
    # --8<-- [start:yarn_cluster]
    of_the_driver = {"spark.yarn.appMasterEnv.PYSPARK_PYTHON": "environment/bin/python"}
    on_the_cluster = {
        "deploy_mode": "cluster",
        "yarn_track_via_rm_api": True,
        "archives": packed["archives"],
        "conf": {**packed["conf"], **of_the_driver},
    }
    BackfillTaskGroup(table="docs", column="embedding", concurrency=32, spark_submit=on_the_cluster)
    # --8<-- [end:yarn_cluster]
