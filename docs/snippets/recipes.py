from airflow.providers.amazon.aws.operators.emr import EmrServerlessStartJobOperator
from airflow.providers.apache.livy.operators.livy import LivyOperator
from airflow.providers.cncf.kubernetes.operators.spark_kubernetes import SparkKubernetesOperator
from airflow.providers.databricks.operators.databricks import DatabricksSubmitRunOperator

from airflow_geneva.operators import spark_application


# --8<-- [start:databricks]
def on_databricks(shard):
    job = spark_application(shard, master="spark://databricks")
    return DatabricksSubmitRunOperator(
        task_id="apply",
        tasks=[
            {
                "task_key": "apply",
                "new_cluster": {
                    "spark_version": "17.3.x-scala2.13",
                    "node_type_id": "m6g.2xlarge",
                    "num_workers": 4,
                    "aws_attributes": {"instance_profile_arn": "arn:aws:iam::123456789012:instance-profile/lake"},
                    "spark_conf": job.conf,
                },
                "libraries": [{"pypi": {"package": "pylance"}}],
                "spark_python_task": {"python_file": job.application, "parameters": job.arguments_with_archives},
            }
        ],
    )


# --8<-- [end:databricks]


# --8<-- [start:emr]
def on_emr(shard):
    python = "./environment/bin/python"
    packed = {
        "spark.archives": "s3://lake/environment.tar.gz#environment",
        "spark.emr-serverless.driverEnv.PYSPARK_PYTHON": python,
        "spark.executorEnv.PYSPARK_PYTHON": python,
    }
    job = spark_application(shard, master="yarn", conf=packed)
    return EmrServerlessStartJobOperator(
        task_id="apply",
        application_id="00f1abcdefgh1234",
        execution_role_arn="arn:aws:iam::123456789012:role/lake",
        job_driver={
            "sparkSubmit": {
                "entryPoint": job.application,
                "entryPointArguments": job.arguments,
                "sparkSubmitParameters": job.submit_parameters,
            }
        },
        configuration_overrides=None,
    )


# --8<-- [end:emr]


# --8<-- [start:livy]
def on_livy(shard):
    job = spark_application(shard, master="yarn")
    return LivyOperator(
        task_id="apply",
        file=job.application,
        args=job.arguments,
        py_files=job.archives,
        conf=job.conf,
        polling_interval=30,
    )


# --8<-- [end:livy]


# --8<-- [start:kubernetes]
def on_kubernetes(shard):
    job = spark_application(shard, master="k8s://https://cluster:6443", spark_uri="s3a://lake/db")
    spec = {
        "type": "Python",
        "pythonVersion": "3",
        "mode": "cluster",
        "sparkVersion": "4.0.1",
        "image": "registry.internal/spark-with-pylance:4.0.1",
        "mainApplicationFile": job.application,
        "arguments": job.arguments,
        "deps": {"pyFiles": job.archives},
        "sparkConf": job.conf,
        "restartPolicy": {"type": "Never"},
        "driver": {"serviceAccount": "lake"},
        "executor": {"serviceAccount": "lake"},
    }
    document = {"apiVersion": "sparkoperator.k8s.io/v1beta2", "kind": "SparkApplication", "spec": spec}
    return SparkKubernetesOperator(task_id="apply", namespace="spark", template_spec={"spark": document})


# --8<-- [end:kubernetes]
