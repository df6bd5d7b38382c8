from airflow_geneva import udf


@udf
def count_words(text: str) -> int:
    return len(text.split())
