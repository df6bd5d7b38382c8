# --8<-- [start:declare]
import pyarrow as pa

from airflow_geneva import connect, expect, udf


def short(values: pa.Table) -> list[bool]:
    return [value < 1_000 for value in values.column("n").to_pylist()]


@udf(
    data_type=pa.int64(),
    expect=[
        expect.not_null(),
        expect.between(0, 1_000_000),
        expect.max_null_fraction(0.01),
        expect.satisfies(short, level="warn"),
    ],
)
def length(text: str) -> int:
    return len(text)


# --8<-- [end:declare]

db = connect("library")
table = db.create_table("docs", pa.table({"text": ["a", "bb", "c" * 2_000]}))
table.add_columns({"n": length})
result = table.backfill("n", udf=length, runner="inline")
view = table.query().select({"letters": "length(text)"}).create_materialized_view(db, "letters")
# --8<-- [start:view]
view.expect({"letters": [expect.not_null(), expect.between(1, 1_000)]})
# --8<-- [end:view]
view.expect({"letters": expect.between(1, 2_000)})
refreshed = view.refresh(runner="inline")
