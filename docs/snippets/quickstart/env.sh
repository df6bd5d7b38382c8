. ~/geneva/venv/bin/activate
export AIRFLOW_HOME=~/geneva/airflow
export AIRFLOW__CORE__LOAD_EXAMPLES=False              # else a hundred DAGs of Airflow's own
export AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL=10     # look for new files every 10 seconds, not every 300
export AIRFLOW__API__HOST=127.0.0.1                    # for this machine only
export AIRFLOW__API__PORT=8080                         # if another program uses it: another one, in both lines
export AIRFLOW__API__BASE_URL=http://127.0.0.1:8080
export AIRFLOW_CONN_LANCE_DEFAULT='{"conn_type": "lance", "host": "'"$HOME"'/geneva/library"}'
export AIRFLOW_CONN_SPARK_DEFAULT='{"conn_type": "spark", "host": "local[2]", "extra": {"deploy-mode": "client"}}'
