import sys

from airflow_geneva import connect

for row in connect("library").open_table(sys.argv[1]).to_arrow().to_pylist():
    print(row)
