"""Text of CSV and JSON becomes values without a change, or is refused by name; the table's type decides."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import random
import time
import zipfile
from datetime import date, datetime, time as clock, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.engine.load.parsing import guess_csv, guess_json, parsed_type, read_csv, read_json
from airflow_geneva.engine.load.texts import MAX_DEPTH, CheckedText, CsvQuotes, JsonStructure
from airflow_geneva.errors import InvalidInput, JobFailed
from airflow_geneva.table import Table

UTC = timezone.utc
TEXT, INT, FLOAT, DATE = pa.string(), pa.int64(), pa.float64(), pa.date32()
SECONDS, ZONED = pa.timestamp("s"), pa.timestamp("us", "UTC")


def checked(content: bytes | str, format: str) -> CheckedText:
    data = content.encode() if isinstance(content, str) else content
    return CheckedText(pa.BufferReader(data), f"values.{format}", format)


def read(content: bytes | str, format: str, kind: pa.DataType | None) -> tuple[pa.DataType, list[Any]]:
    """Read column `a` as a table's column of a type has it, or as a new column."""
    guess = guess_csv if format == "csv" else guess_json
    found = guess([checked(content, format)], ["a"])["a"] if kind is None else parsed_type(kind, format)
    batches = list((read_csv if format == "csv" else read_json)(checked(content, format), pa.schema([("a", found)])))
    for batch in batches:
        batch.validate(full=True)
    return found, [value for batch in batches for value in batch.column("a").cast(kind or found).to_pylist()]


# A line: the fields as written, the type of the table's column (None: the column is new), the type read, the values.
CSV_VALUES: list[tuple[str, list[str], pa.DataType | None, pa.DataType, list[Any]]] = [
    ("numbers are text in a column of text", ["1", "007", "1e3", " 5"], TEXT, TEXT, ["1", "007", "1e3", " 5"]),
    ("dates are text in a column of text", ["2024-01-01"], TEXT, TEXT, ["2024-01-01"]),
    ("bools are text in a column of text", ["true", "False"], TEXT, TEXT, ["true", "False"]),
    ("words for nothing are text", ["NA", "null", "N/A", "nan"], TEXT, TEXT, ["NA", "null", "N/A", "nan"]),
    ("only an empty field without quotes is missing", ["", '""'], TEXT, TEXT, [None, ""]),
    ("a NUL byte is text", ["x\0y"], TEXT, TEXT, ["x\0y"]),
    ("quotes within an unquoted field are text", ['5" pipe', 'a""b'], TEXT, TEXT, ['5" pipe', 'a""b']),
    ("doubled quotes", ['"say ""hi"""', '""""'], TEXT, TEXT, ['say "hi"', '"']),
    ("line ends within quotes", ['"a\r\nb"', '"c\nd"'], TEXT, TEXT, ["a\r\nb", "c\nd"]),
    ("a large text column", ["01"], pa.large_string(), TEXT, ["01"]),
    ("a text column with a dictionary", ["01"], pa.dictionary(pa.int32(), TEXT), TEXT, ["01"]),
    ("a zip code stays text", ["12345", "01234"], None, TEXT, ["12345", "01234"]),
    ("a negative number with a zero stays text", ["-012"], None, TEXT, ["-012"]),
    ("a phone number stays text", ["+4912345"], None, TEXT, ["+4912345"]),
    ("hexadecimal digits stay text", ["0x10"], None, TEXT, ["0x10"]),
    ("a column of NA is text", ["NA", "NA"], None, TEXT, ["NA", "NA"]),
    ("a column of nothing is text", ["", ""], None, TEXT, [None, None]),
    ("integers beyond 64 bits stay text", ["123456789012345678901", "1"], None, TEXT, ["123456789012345678901", "1"]),
    ("integers that a double rounds stay text", ["9007199254740993", "1.5"], None, TEXT, ["9007199254740993", "1.5"]),
    ("names such as Nan and Inf stay text", ["Nan", "inf"], None, TEXT, ["Nan", "inf"]),
    ("integers", ["1", "-2", " 3", "0", ""], None, INT, [1, -2, 3, 0, None]),
    ("integers and words for nothing", ["1", "NA"], None, INT, [1, None]),
    ("floating numbers", ["1", "2.5", "1e3", "inf"], None, FLOAT, [1.0, 2.5, 1000.0, float("inf")]),
    ("bools", ["true", "FALSE"], None, pa.bool_(), [True, False]),
    ("dates", ["2024-02-29"], None, DATE, [date(2024, 2, 29)]),
    ("a day that there is not is text", ["2024-02-30"], None, TEXT, ["2024-02-30"]),
    ("times of a day", ["12:30"], None, pa.time32("s"), [clock(12, 30)]),
    ("times without a zone", ["2024-01-01 12:30:00"], None, SECONDS, [datetime(2024, 1, 1, 12, 30)]),
    ("times with a zone", ["2024-01-01T02:00:00+02:00"], None, pa.timestamp("s", "UTC"),
     [datetime(2024, 1, 1, tzinfo=UTC)]),
    ("times with and without a zone are text", ["2024-01-01T00:00", "2024-01-01T00:00Z"], None, TEXT,
     ["2024-01-01T00:00", "2024-01-01T00:00Z"]),
    ("integers of a table", ["007", "+5", "5.0", "1e3", " 5", "NA"], INT, INT, [7, 5, 5, 1000, 5, None]),
    ("the largest integer", ["18446744073709551615"], pa.uint64(), pa.uint64(), [2**64 - 1]),
    ("decimals", ["12345678901234567.89", "1e2", "NA"], pa.decimal128(20, 2), pa.decimal128(20, 2),
     [Decimal("12345678901234567.89"), Decimal(100), None]),
    ("decimals with an exponent", ["12e-1", "0e-999999999", f"1.{5_000 * '0'}"], pa.decimal128(20, 2),
     pa.decimal128(20, 2), [Decimal("1.2"), Decimal(0), Decimal(1)]),
    ("bools of a table", ["1", "0", "true"], pa.bool_(), pa.bool_(), [True, False, True]),
    ("small floating numbers", ["0.5", "NaN"], pa.float32(), FLOAT, [0.5, pytest.approx(float("nan"), nan_ok=True)]),
    ("a day is its first moment", ["2024-01-01"], SECONDS, SECONDS, [datetime(2024, 1, 1)]),
    ("times of microseconds", ["12:30:01.5"], pa.time64("us"), pa.time64("us"), [clock(12, 30, 1, 500_000)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "kind", "found", "values"), [one[1:] for one in CSV_VALUES], ids=[one[0] for one in CSV_VALUES]
)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "BOM"])
def test_values_of_csv(
    fields: list[str], kind: pa.DataType | None, found: pa.DataType, values: list[Any], end: str, mark: str
) -> None:
    content = mark + end.join(["id,a", *(f"{at},{field}" for at, field in enumerate(fields))]) + end
    assert read(content, "csv", kind) == (found, values)


# A line: the field, the type of the table's column.
CSV_REFUSED: list[tuple[str, pa.DataType]] = [
    ("abc", INT), ("1_000", INT), ("0x10", INT), ("5.5", INT), ("NaN", INT), ("inf", INT), ("9223372036854775808", INT),
    ("300", pa.int8()), ("-1", pa.uint8()), ("1 2", INT), ("true", INT),
    ("1.239", pa.decimal128(10, 2)), ("123456789.12", pa.decimal128(10, 2)), ("nan", pa.decimal128(10, 2)),
    ("1e999", FLOAT), ("9007199254740993", FLOAT), ("1.5.2", FLOAT), ("1e999", pa.float32()),
    ("yes", pa.bool_()), ("2", pa.bool_()),
    ("2024-02-30", DATE), ("30.01.2024", DATE), ("2024-01-01 12:00", DATE), ("19000", DATE),
    ("2024-01-01T00:00:00Z", SECONDS), ("2024-01-01T00:00:00", ZONED),
    ("2024-01-01 00:00:00.1234567", pa.timestamp("us")),
    ("9" * 39, pa.decimal128(38, 0)), ("1e-39", pa.decimal128(38, 0)), ("9" * 77, pa.decimal256(76, 0)),
    ("9" * 500, INT), ("1e-999999999", INT), ("1e999999999", INT), ("1e-999999999", pa.decimal128(38, 2)),
    ("123e-41", pa.decimal128(38, 2)), (f"1.{5_000 * '0'}1", pa.decimal128(38, 0)), ("1_0e2", pa.decimal128(10, 2)),
    ("25:00", pa.time32("s")), ("12", pa.time32("s")), ("12:30:01.5", pa.time32("s")), ("12:30Z", pa.time32("s")),
]  # fmt: skip


@pytest.mark.parametrize(("field", "kind"), CSV_REFUSED, ids=lambda value: str(value)[:20])
def test_values_of_csv_that_the_type_of_the_table_does_not_have(field: str, kind: pa.DataType) -> None:
    rows = ["", "NA"] * 40
    content = "\n".join(["id,a", *(f"{at},{text}" for at, text in enumerate([*rows, field, field]))])
    with pytest.raises(InvalidInput, match=r"Column 'a' of 'values.csv' has '.* in row 81, which cannot be loaded as"):
        read(content, "csv", kind)


# A line: what is written, the type of the table's column (None: the column is new), its type, its values.
JSON_VALUES: list[tuple[str, str, pa.DataType | None, pa.DataType, list[Any]]] = [
    ("text that looks like numbers and dates", '{"a":"007"}{"a":"2024-01-01"}', None, TEXT, ["007", "2024-01-01"]),
    ("times are text in a new column", '{"a":"2024-01-01 00:00:00"}', None, TEXT, ["2024-01-01 00:00:00"]),
    ("words for nothing are text", '{"a":"NA"}\n{"a":""}\n{"a":null}\n{}', TEXT, TEXT, ["NA", "", None, None]),
    ("numbers in a column of text", '{"a":123456789012345678901}\n{"a":1.10}\n{"a":true}', TEXT, TEXT,
     ["123456789012345678901", "1.10", "true"]),
    ("text and numbers in a column of text", '{"a":"x"}\n{"a":1}', TEXT, TEXT, ["x", "1"]),
    ("decimals", '{"a":123456789012345678901}\n{"a":"1.50"}', pa.decimal128(30, 2), pa.decimal128(30, 2),
     [Decimal("123456789012345678901"), Decimal("1.50")]),
    ("decimals with an exponent", '{"a":12e-1}\n{"a":0e-999999999}\n{"a":"\\u0031e1"}', pa.decimal128(20, 2),
     pa.decimal128(20, 2), [Decimal("1.2"), Decimal(0), Decimal(10)]),
    ("a row that is null", 'null\n{"a":1}\nnull', INT, INT, [None, 1, None]),
    ("a row that is null in a new column", 'null\n{"a":1}', None, INT, [None, 1]),
    ("integers that are written otherwise", '{"a":5.0}\n{"a":1e3}\n{"a":"7"}', INT, INT, [5, 1000, 7]),
    ("the largest integer", '{"a":18446744073709551615}', pa.uint64(), pa.uint64(), [2**64 - 1]),
    ("integers", '{"a":1}\n{"a":-9223372036854775808}', None, INT, [1, -(2**63)]),
    ("integers and floating numbers", '{"a":1}\n{"a":2.5}\n{"a":1e300}', None, FLOAT, [1.0, 2.5, 1e300]),
    ("dates", '{"a":"2024-02-29"}', DATE, DATE, [date(2024, 2, 29)]),
    ("times with a zone", '{"a":"2024-01-01T02:00:00+02:00"}', ZONED, ZONED, [datetime(2024, 1, 1, tzinfo=UTC)]),
    ("nothing but NULL", '{"a":null}', None, TEXT, [None]),
    ("blank lines, and rows of several lines", '\n\n{"a":\n1}\n\n\r\n{"a":2}\n \n', None, INT, [1, 2]),
    ("a byte order mark", '\ufeff{"a":1}', None, INT, [1]),
    ("brackets and quotes in text", json.dumps({"a": '[[{"\\'}) + '{"a":"\\\\"}{"a":"]"}', None, TEXT,
     ['[[{"\\', "\\", "]"]),
    ("NUL, and letters beyond 16 bits", '{"a":"\\u0000\\ud83d\\ude00"}', None, TEXT, ["\0\U0001f600"]),
    ("dates in structs and lists", '{"a":[{"d":"2024-01-01"},{"d":null},null]}\n{"a":null}\n{"a":[]}',
     pa.list_(pa.struct({"d": DATE})), pa.list_(pa.struct({"d": DATE})),
     [[{"d": date(2024, 1, 1)}, {"d": None}, None], None, []]),
    ("long numbers in structs", '{"a":{"n":12345678901234567890123}}', pa.struct({"n": TEXT}), pa.struct({"n": TEXT}),
     [{"n": "12345678901234567890123"}]),
    ("fields that only some rows have", '{"a":{"x":1}}\n{"a":{"y":"t"}}', None, pa.struct({"x": INT, "y": TEXT}),
     [{"x": 1, "y": None}, {"x": None, "y": "t"}]),
    ("lists without an item", '{"a":[]}\n{"a":[[]]}', None, pa.list_(pa.list_(TEXT)), [[], [[]]]),
    ("other fields of several types", '{"a":1,"b":1}\n{"a":2,"b":"x"}', None, INT, [1, 2]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "kind", "found", "values"), [one[1:] for one in JSON_VALUES], ids=[one[0] for one in JSON_VALUES]
)
def test_values_of_json(content: str, kind: pa.DataType | None, found: pa.DataType, values: list[Any]) -> None:
    assert read(content, "json", kind) == (found, values)


# A line: what is written, the type of the table's column (None: the column is new), what the error says.
JSON_REFUSED: list[tuple[str, pa.DataType | None, str]] = [
    ('{"a":1}\n{"a":123456789012345678901}', None, "123456789012345678901 exceeds 64 bits, in row 2"),
    ('{"a":9223372036854775808}', None, "exceeds 64 bits, in row 1"),
    ('{"a":[{"n":9223372036854775808}]}', None, "exceeds 64 bits, in row 1"),
    ('{"a":1}\n{"a":"x"}', None, "int64 and string, in row 2"),
    ('{"a":[1]}\n{"a":{"b":1}}', None, "list.* and struct.*, in row 2"),
    ('{"a":9007199254740993}\n{"a":1.5}', FLOAT, "has '9007199254740993' in row 1, which cannot be loaded as double"),
    ('{"a":1e999}', FLOAT, "has '1e999' in row 1"),
    ('{"a":1.5}', INT, "has '1.5' in row 1"),
    ('{"a":true}', INT, "has 'true' in row 1"),
    ('{"a":1.239}', pa.decimal128(10, 2), "has '1.239' in row 1"),
    ('{"a":1e-39}', pa.decimal128(38, 0), "has '1e-39' in row 1"),
    ('{"a":1e-999999999}', pa.decimal128(38, 2), "has '1e-999999999' in row 1"),
    ('{"a":["1\\u0065-999999999"]}', pa.list_(pa.decimal128(38, 2)), "has '1e-999999999'"),
    ('null\ntrue', INT, "Row 2 of 'values.json' is no valid JSON: it is no object"),
    ('{"a":19000}', DATE, "has '19000' in row 1"),
    ('{"a":"NA"}', DATE, "has 'NA' in row 1"),
    ('{"a":"2024-01-01T00:00:00Z"}', SECONDS, "expected no zone offset"),
    ('{"a":{"x":1,"y":2}}', pa.struct({"x": INT}), "the type lacks the field 'y', in row 1"),
    ('{"a":{"x":1}}', TEXT, 'cannot be loaded as string: {"x": "1"} is no single value, in row 1'),
    ('{"a":1}', pa.list_(INT), '"1" is no array, in row 1'),
    ('{"a":1,"a":2}', INT, "Row 1 of 'values.json' is no valid JSON: the field 'a' is there twice"),
    ('{"a":{"x":1,"x":2}}', None, "the field 'x' is there twice"),
    ('{"a":1}\n5', INT, "Row 2 of 'values.json' is no valid JSON: it is no object"),
    ('{"a":1}\n{"a":', INT, "Row 2 of 'values.json' is no valid JSON"),
    ('{"a":1,}', INT, "Row 1 of 'values.json' is no valid JSON"),
    ("{'a':1}", INT, "Row 1 of 'values.json' is no valid JSON"),
    ('{"a":1}}', INT, "Row 2 of 'values.json' is no valid JSON"),
    ('{"a":01}', INT, "Row 1 of 'values.json' is no valid JSON"),
    ('{"a":"\\ud800"}', TEXT, "half of a surrogate pair"),
    ('[{"a":1},{"a":2}]', INT, "'values.json' holds an array, where rows are objects.* jq"),
    ('{"a":"' + "9" * 5_000 + '"}', INT, "has '9999"),
    ('{"a":' + "9" * 5_000 + "}", None, "exceeds 64 bits"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "kind", "message"), JSON_REFUSED)
def test_values_of_json_that_would_change(content: str, kind: pa.DataType | None, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read(content, "json", kind)


def zipped(text: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("values.csv", text)
    return file.getvalue()


PLAIN = "id,a\n1,x\n2,café\n"
# A line: the bytes of a file named .csv, what the error says.
FILES_REFUSED: dict[str, tuple[bytes, str]] = {
    "gzip": (gzip.compress(PLAIN.encode()), "compressed by gzip. End its name with .gz, as in values.csv.gz"),
    "bzip2": (bz2.compress(PLAIN.encode()), "a file that is compressed by bzip2"),
    "zstd": (pa.compress(b"id" * 99, "zstd", asbytes=True), "compressed by zstd. .* name the format: format='csv'"),
    "zip": (zipped(PLAIN.encode()), "a file that is a zip archive, as a workbook is. Unpack it"),
    "Parquet": (b"PAR1" + PLAIN.encode(), 'a file that is Parquet. Load it with format="parquet"'),
    "UTF-16": (PLAIN.encode("utf-16"), "a file that is UTF-16. Convert it to UTF-8: iconv"),
    "Latin-1 in the body": (PLAIN.encode("latin-1"), "is not UTF-8: line 3 has the byte 0xE9. .* iconv -f LATIN1"),
    "Latin-1 in the header": ("id,café\n1,x\n".encode("latin-1"), "is not UTF-8: line 1 has the byte 0xE9"),
    "a letter that is cut off": ("id,a\n1,é".encode()[:-1], "is not UTF-8: line 2 has the byte 0xC3"),
    "overlong UTF-8": (b"id,a\n1,\xc0\xaf\n", "is not UTF-8: line 2 has the byte 0xC0"),
    "a surrogate": (b"id,a\n1,\xed\xa0\x80\n", "is not UTF-8: line 2 has the byte 0xED"),
    "a quote that is never closed": (b'id,a\n1,"x\n2,y\n', 'has a quote \\("\\) in line 2 that no other one closes'),
    "a quote that is closed by chance": (b'id,a\n1,"x\n2,y\n3,"z"\n', "has text after the quote .* in line 4"),
    "text after quotes": (b'id,a\n1,"x"y\n', 'has text after the quote \\("\\) that closes a field, in line 2'),
    "text after quotes, and a quote in text": (b'id,a\n1,5" x\n2,"x" ,\n', "has text after the quote .* in line 3"),
    "too few fields": (b"id,a\n1,x\n2\n", "Expected 2 columns, got 1"),
    "too many fields": (b"id,a\n1,x\n2,y,z\n", "Expected 2 columns, got 3"),
    "columns of one name": (b"id,a,a\n1,x,y\n", "has several columns 'a'"),
    "names in another case": (b"ID,a\n1,x\n", "the key 'id' is not in .*, which has ID, a"),
    "a row of 40 MB": (b"id,a\n1," + b"x" * (40 << 20), "A row of .* has more than 16 MB"),
    "nothing but quotes": (b"id,a\n1," + b'"' * (40 << 20), "A row of .* has more than 16 MB"),
}  # fmt: skip


def table_of(folder: Path, **columns: Any) -> Table:
    return connect(folder / "db").create_table("docs", pa.table({"id": pa.array([1, 2], INT), **columns}))


@pytest.mark.parametrize("name", list(FILES_REFUSED))
@pytest.mark.parametrize("known", [True, False], ids=["a column of the table", "a new column"])
def test_files_that_are_refused_by_name(tmp_path: Path, name: str, known: bool) -> None:
    content, message = FILES_REFUSED[name]
    table = table_of(tmp_path, **({"a": ["old", None]} if known else {}))
    (tmp_path / "values.csv").write_bytes(content)
    with pytest.raises((InvalidInput, JobFailed), match=message) as refused:
        table.load_columns(tmp_path / "values.csv", on="id", runner="inline")
    assert "values.csv" in str(refused.value)
    assert table.schema.names == (["id", "a"] if known else ["id"])


def test_what_a_column_of_text_has_is_loaded_unchanged(tmp_path: Path) -> None:
    table = table_of(tmp_path, a=["old", "old"], b=["old", "old"])
    (tmp_path / "values.csv").write_text("id,a,b,c\n1,01234,NA,01234\n2,true,,12345\n")
    for columns in ["a", "b"], ["c"]:
        assert table.load_columns(tmp_path / "values.csv", on="id", columns=columns, runner="inline").rows_loaded == 2
    assert table.to_arrow().drop_columns("id").to_pylist() == [
        {"a": "01234", "b": "NA", "c": "01234"}, {"a": "true", "b": None, "c": "12345"}
    ]  # fmt: skip


@pytest.mark.parametrize("format", ["csv", "json"])
def test_the_type_of_a_new_column_is_that_of_the_values_of_all_files(tmp_path: Path, format: str) -> None:
    table = table_of(tmp_path)
    for number, value in ((1, "12345"), (2, "01234" if format == "csv" else "1.5")):
        line = f"id,a\n{number},{value}\n" if format == "csv" else f'{{"id":{number},"a":{value}}}\n'
        (tmp_path / f"{number}.{format}").write_text(line)
    table.load_columns(str(tmp_path / f"*.{format}"), on="id", runner="inline")
    assert table.to_arrow()["a"].to_pylist() == (["12345", "01234"] if format == "csv" else [12345.0, 1.5])


@pytest.mark.spark
@pytest.mark.parametrize("format", ["csv", "json"])
def test_spark_loads_the_same_values_of_texts(tmp_path: Path, format: str) -> None:
    row = {"s": "01234", "n": "NA", "d": "2024-02-29", "p": "12345678901234567.89", "z": "2024-01-01T02:00:00+02:00"}
    lines = [{"id": "1", **row, "new": "007"}, {"id": "2", **row, "new": "12"}]
    place = tmp_path / f"values.{format}"
    if format == "csv":
        place.write_text("\n".join([",".join(lines[0]), *(",".join(line.values()) for line in lines)]))
    else:
        place.write_text("\n".join(json.dumps(line) for line in lines))
    found = []
    for runner in ("inline", "spark"):
        columns = {"s": TEXT, "n": TEXT, "d": DATE, "p": pa.decimal128(20, 2), "z": ZONED}
        table = table_of(tmp_path / runner, **{name: pa.nulls(2, kind) for name, kind in columns.items()})
        for names in list(columns), ["new"]:
            assert table.load_columns(place, on="id", columns=names, runner=runner).rows_loaded == 2
        found.append(table.to_arrow().to_pylist())
    assert found[0] == found[1]
    assert (found[0][0]["s"], found[0][0]["n"], found[0][0]["new"]) == ("01234", "NA", "007")
    place.write_bytes(place.read_bytes().replace(b"2024-02-29", b"2024-02-30"))
    for runner in ("inline", "spark"):
        table = connect(tmp_path / runner / "db").open_table("docs")
        with pytest.raises(
            (InvalidInput, JobFailed), match="has '2024-02-30' in row 1, which cannot be loaded as date32"
        ):
            table.load_columns(place, on="id", runner=runner)


# --- structure


@pytest.mark.parametrize("seed", range(40))
def test_a_column_of_text_has_what_another_reader_of_csv_finds(seed: int) -> None:
    dice = random.Random(f"csv-{seed}")
    parts = ["a", "é", ",", '"', '""', "\n", "\r\n", " ", "0", "NA", "\0", "null", "\t", "'", "x" * 50]
    texts = ["".join(dice.choices(parts, k=dice.randint(1, 6))) for _ in range(dice.choice([3, 400]))]
    file = io.StringIO(newline="")
    csv.writer(file, quoting=dice.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])).writerows(
        [("id", "a"), *enumerate(texts)]
    )
    assert read(file.getvalue(), "csv", TEXT) == (TEXT, texts)


def test_quotes_are_followed_in_linear_time_where_some_are_text() -> None:
    quotes, began = CsvQuotes("x.csv"), time.process_time()
    quotes.feed(b'5" pipe\n' + b'"a\nb"\n' * 150_000)
    quotes.end()
    assert time.process_time() - began < 3


@pytest.mark.parametrize("seed", range(200))
def test_quotes_are_refused_where_arrow_would_drop_them_wherever_pieces_end(seed: int) -> None:
    dice = random.Random(f"quotes-{seed}")
    text = "".join(dice.choices(['"', '"', "a", ",", "\n"], k=dice.randint(1, 40))).encode()

    def refusal(size: int) -> str:
        quotes = CsvQuotes("x.csv")
        try:
            for at in range(0, len(text), size):
                quotes.feed(text[at : at + size])
            quotes.end()
        except InvalidInput as error:
            return str(error)
        return ""

    state, refused = "begin", False  # the grammar of CSV, letter by letter
    for letter in text.decode():
        if state == "quoted":
            state = "after" if letter == '"' else "quoted"
        elif state == "after" and letter == '"':
            state = "quoted"
        elif letter in ",\n":
            state = "begin"
        elif state == "after":
            refused = True
            break
        else:
            state = "quoted" if state == "begin" and letter == '"' else "plain"
    assert (refusal(100) != "") == (refused or state == "quoted")
    assert {refusal(size) for size in (1, 2, 3, 7)} == {refusal(100)}


@pytest.mark.parametrize("seed", range(100))
def test_rows_of_json_end_where_their_objects_do_wherever_pieces_end(seed: int) -> None:
    dice = random.Random(f"json-{seed}")
    texts = ["{", "}", "[", '"', "\\", "\\\\", 'x"', "é"]

    def value(depth: int) -> Any:
        kind = dice.choice(["text", "list", "object"] if depth else ["text"])
        if kind == "text":
            return "".join(dice.choices(texts, k=dice.randint(0, 5)))
        items = [value(depth - 1) for _ in range(dice.randint(0, 3))]
        return items if kind == "list" else {f"{at}{texts[at]}": one for at, one in enumerate(items)}

    rows = [json.dumps({"a": value(3)}, ensure_ascii=dice.random() < 0.5).encode() for _ in range(5)]
    text = b"\n".join(rows)
    for size in (1, 2, 3, 7, 100):
        structure, ends, left = JsonStructure("x.json"), list[int](), text
        for at in range(0, len(left), size):
            structure.feed(left[at : at + size])
            if structure.after_last_row == 0:
                ends.append(min(at + size, len(left)))
        assert size > 1 or ends == [sum(map(len, rows[: at + 1])) + at for at in range(len(rows))]
        assert structure.after_last_row == 0


@pytest.mark.parametrize("shape", [("[", "]"), ('{"a":', "}")], ids=["arrays", "objects"])
@pytest.mark.parametrize(("levels", "works"), [(12, True), (20, True), (60, True), (1_000, False), (100_000, False)])
@pytest.mark.parametrize("known", [True, False], ids=["a column that is not loaded", "a new column"])
def test_json_of_many_levels_is_loaded_or_refused_at_once(
    tmp_path: Path, shape: tuple[str, str], levels: int, works: bool, known: bool
) -> None:
    table, place = table_of(tmp_path, b=[0, 0]), tmp_path / "values.json"
    place.write_text(f'{{"id":1,"b":1,"a":{shape[0] * levels}1{shape[1] * levels}}}\n')
    began = time.process_time()
    if works:
        assert table.load_columns(place, on="id", columns=["b" if known else "a"], runner="inline").rows_loaded == 1
    else:
        with pytest.raises(InvalidInput, match=f"has more than {MAX_DEPTH} levels of objects and arrays. Flatten it"):
            table.load_columns(place, on="id", columns=["b" if known else "a"], runner="inline")
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * (32 << 20), "levels of objects and arrays"),
        (b'{"a":' * (4 << 20), "levels of objects and arrays"),
        (b'{"a":"' + b'\\"' * (12 << 20), "A row of 'values.json' has more than 16 MB"),
        (b'"' * (32 << 20), "A row of 'values.json' has more than 16 MB"),
        (b"\\" * (32 << 20), "A row of 'values.json' has more than 16 MB"),
    ],
    ids=["arrays", "objects", "escaped quotes", "quotes", "backslashes"],
)
def test_the_structure_of_json_is_found_in_linear_time(content: bytes, message: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidInput, match=message):
        list(checked(content, "json").rows())
    assert time.process_time() - began < 5


# --- compression


@pytest.mark.parametrize("format", ["csv", "json"])
@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_texts_are_expanded_in_pieces(
    tmp_path: Path, format: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expanded = list[int]()

    class Expanding:
        def __init__(self, stream: pa.NativeFile) -> None:
            self.stream = stream

        def read(self, size: int) -> bytes:
            piece: bytes = self.stream.read(size)
            expanded.append(len(piece))
            return piece

    monkeypatch.setattr("airflow_geneva.engine.load.texts.TEXT_BLOCK", 1 << 20)
    opened = lambda stream, path, format: CheckedText(Expanding(stream), path, format)  # noqa: E731
    monkeypatch.setattr("airflow_geneva.engine.load.source.CheckedText", opened)
    head, row = ("id,a\n", "{},{}\n") if format == "csv" else ("", '{{"id":{},"a":"{}"}}\n')
    content = (head + "".join(row.format(3 + at, "0" * 4_000) for at in range(5_000)) + row.format(1, "007")).encode()
    place = tmp_path / f"values.{format}.{suffix}"
    with pa.output_stream(str(place), compression={"gz": "gzip", "zst": "zstd"}[suffix]) as stream:
        stream.write(content)
    assert place.stat().st_size < len(content) // 50
    table = table_of(tmp_path, a=["", ""])
    assert table.load_columns(place, on="id", format=format, runner="inline").rows_loaded == 1
    assert table.to_arrow()["a"].to_pylist() == ["007", ""]
    assert max(expanded) == 1 << 20
    assert sum(expanded) >= len(content)


@pytest.mark.parametrize("cut", [1, 8, 20])
def test_a_compressed_file_that_is_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    table = table_of(tmp_path, a=["old", "old"])
    (tmp_path / "values.csv.gz").write_bytes(gzip.compress(PLAIN.encode())[:-cut])
    with pytest.raises((InvalidInput, JobFailed), match=r"Cannot read .*values\.csv\.gz"):
        table.load_columns(tmp_path / "values.csv.gz", on="id", runner="inline")
    assert table.to_arrow()["a"].to_pylist() == ["old", "old"]


def test_a_file_compressed_in_several_members_is_read_to_its_end(tmp_path: Path) -> None:
    table = table_of(tmp_path, a=["old", "old"])
    parts = [gzip.compress(text.encode()) for text in ("id,a\n1,x\n", "2,y\n")]
    (tmp_path / "values.csv.gz").write_bytes(b"".join(parts))
    table.load_columns(tmp_path / "values.csv.gz", on="id", runner="inline")
    assert table.to_arrow()["a"].to_pylist() == ["x", "y"]
