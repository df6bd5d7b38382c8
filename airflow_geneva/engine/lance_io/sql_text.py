"""SQL text that others wrote: tokens in linear time, and the size up to which native code may parse and evaluate it.

pylance's parser and optimizer recurse over an expression on threads with a stack of 2 MB, and evaluate its constants
when they plan: a filter of 800 terms `id+id+...` ends the process, and `repeat('x', 10000000)` takes a gigabyte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf
from typing import Literal, NamedTuple

from airflow_geneva.errors import InvalidInput

MOST_CHARACTERS = 1_000_000
MOST_VALUES = 50_000
"""Values in lists, such as `id IN (1, 2, 3)`, which cost native code little."""
MOST_TOKENS = 10_000
"""Tokens besides these values."""
MOST_IN_A_TERM = 200
"""Tokens of one term and of the deepest brackets in it, between two of AND, OR and commas: half of them operators."""
MOST_NESTED = 40
MOST_REPEATED = 10_000
"""The product of the numbers within one call of a function that makes long values, such as `repeat('x', 100)`."""

Kind = Literal["name", "quoted", "text", "number", "symbol"]

# No text is matched in two ways, so splitting takes linear time. Quotes and comments are searched for their ends.
_TOKEN = re.compile(
    r"\s*(?:(?P<opening>--|/\*|['\"`])|(?P<name>(?![0-9$])(?:[A-Za-z0-9_@#$]|[^\x00-\x7f\s])+)"
    r"|(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)|(?P<symbol>\|\||::|[<>!]=|<>|\S)|\Z)"
)
_QUOTES: dict[str, Kind] = {"'": "text", '"': "quoted", "`": "name"}
_GROWING = {
    "repeat", "lpad", "rpad", "array_repeat", "list_repeat", "range", "generate_series", "array_resize", "list_resize",
}  # fmt: skip
_SPLITTING = {"and", "or"}
_DIGITS_OF_A_COUNT, _DIGITS_OF_A_NUMBER = 5, 300
_SHORT_CHARACTERS = 10_000


class Token(NamedTuple):
    """A name, a literal or a symbol of SQL, as Lance parses it, with its place in the text.

    Names stand in backticks or bare; text in double quotes, of the kind `quoted`, is a literal too. `field` says that
    the name follows a dot, `call` that a bracket follows it, and `empty` that nothing is in this bracket; `call_end` is
    the end of the bracket that opens the call, or of the empty brackets.
    """

    kind: Kind
    text: str
    start: int
    end: int
    field: bool = False
    call: bool = False
    empty: bool = False
    call_end: int = 0

    @property
    def name(self) -> str:
        """The text without its quotes."""
        if self.text[0] not in '`"':
            return self.text
        return self.text[1:-1].replace(self.text[0] * 2, self.text[0])

    @property
    def bare(self) -> str:
        """A name without quotes in lower case, which may be a word of SQL; else ""."""
        return self.text.lower() if self.kind == "name" and self.text[0] != "`" else ""


def read_sql(sql: str) -> tuple[Token, ...]:
    """Split SQL into its tokens, without comments.

    Raises:
        InvalidInput: it is larger, longer or deeper than native code can safely parse and evaluate.
    """
    if len(sql) > MOST_CHARACTERS:
        raise _too_large(sql, f"has {len(sql):,} characters", MOST_CHARACTERS)
    return (_read_short if len(sql) <= _SHORT_CHARACTERS else _read_long)(sql)


def _read(sql: str) -> tuple[Token, ...]:
    found = _with_calls(_split(sql))
    _check_size(sql, found)
    return found


# A filter is read several times: to freeze it, for its columns, and before each use.
_read_short, _read_long = lru_cache(maxsize=64)(_read), lru_cache(maxsize=2)(_read)


def replace_tokens(sql: str, replace: Callable[[Token], str | None]) -> str:
    """Replace tokens, with the brackets of a call in which nothing is; None keeps a token."""
    parts, at = list[str](), 0
    for token in read_sql(sql):
        new = replace(token)
        if new is not None:
            parts += [sql[at : token.start], new]
            at = token.call_end if token.empty else token.end
    return "".join([*parts, sql[at:]])


def names_in(sql: str) -> set[str]:
    """Return every name in a filter or expression, in lower case; text in double quotes counts as a name."""
    return {token.name.lower() for token in read_sql(sql) if token.kind in ("name", "quoted")}


def _split(sql: str) -> list[Token]:
    found: list[Token] = []
    at, size, most = 0, len(sql), 2 * MOST_VALUES + MOST_TOKENS
    match, make = _TOKEN.match, found.append
    while at < size:
        token = match(sql, at)
        assert token is not None  # a symbol is any character
        kind, start, at = token.lastgroup, token.start(token.lastgroup or 0), token.end()
        if kind == "opening":
            first = sql[start]
            if first in _QUOTES:
                at = _end_of_quoted(sql, start)
                make(Token(_QUOTES[first], sql[start:at], start, at))
            else:
                at = _after(sql, "\n", at) if first == "-" else _after(sql, "*/", at)
        elif kind is not None:
            make(Token(kind, sql[start:at], start, at))  # type: ignore[arg-type]
        if len(found) > most:
            raise _too_large(sql, f"has more than {most:,} words, numbers and signs", most)
    return found


def _after(sql: str, mark: str, at: int) -> int:
    found = sql.find(mark, at)
    return len(sql) if found < 0 else found + len(mark)


def _end_of_quoted(sql: str, start: int) -> int:
    quote, at = sql[start], start + 1
    while (end := sql.find(quote, at)) >= 0:
        if not sql.startswith(quote, end + 1):
            return end + 1
        at = end + 2
    return len(sql)


def _with_calls(tokens: Sequence[Token]) -> tuple[Token, ...]:
    found, before = list(tokens), ""
    for at, token in enumerate(tokens):
        if token.kind == "name":
            call = at + 1 < len(tokens) and tokens[at + 1].text == "("
            empty = call and at + 2 < len(tokens) and tokens[at + 2].text == ")"
            if call or before == ".":
                found[at] = Token(*token[:4], before == ".", call, empty, tokens[at + 1 + empty].end if call else 0)
        before = token.text
    return tuple(found)


class _Brackets:
    """What stands between two brackets: the current term, the longest one, and the product of all numbers."""

    def __init__(self, function: str = "") -> None:
        self.function = function
        self.tokens = self.deepest = self.longest = 0
        self.plain = True
        self.product = 1.0

    def end_term(self) -> None:
        self.longest = max(self.longest, self.tokens + self.deepest)
        self.tokens, self.deepest, self.plain = 0, 0, True


def _check_size(sql: str, tokens: Sequence[Token]) -> None:
    stack, counted, values, called = [_Brackets()], 0, 0, ""
    for token in tokens:
        here, text = stack[-1], token.text if token.kind == "symbol" else ""
        splits = len(token.text) <= 3 and token.text.lower() in _SPLITTING and not token.field
        if splits or text in (",", ")", "]"):
            # One value is also a number with its sign, or a text with its type.
            listed = not splits and len(stack) > 1 and here.plain and here.tokens <= 2
            counted, values = counted + (0 if listed else here.tokens), values + listed
            here.end_term()
        if splits:
            counted, here.plain = counted + 1, False
        elif text in ("(", "["):
            here.plain = False
            here.tokens += 1
            stack.append(_Brackets(called))
        elif text in (")", "]"):
            if here.function in _GROWING and here.product > MOST_REPEATED:
                what = f"calls {here.function}() with numbers whose product is {here.product:,.0f}"
                raise _too_large(sql, what, MOST_REPEATED)
            if len(stack) > 1:
                stack.pop()
                stack[-1].deepest = max(stack[-1].deepest, here.longest)
                stack[-1].product *= here.product
        elif text != ",":
            here.tokens += 1
            here.product *= max(_as_count(token), 1.0)
        called = token.name.lower() if token.call else ""
        if len(stack) - 1 > MOST_NESTED:
            raise _too_large(sql, "opens too many brackets within each other", MOST_NESTED)
        if here.tokens + here.deepest > MOST_IN_A_TERM:
            raise _too_large(
                sql, "has too many words, numbers and signs between two of AND, OR and commas", MOST_IN_A_TERM
            )
    counted += sum(one.tokens for one in stack)
    if counted > MOST_TOKENS:
        raise _too_large(sql, f"has {counted:,} words, numbers and signs outside of lists of values", MOST_TOKENS)
    if values > MOST_VALUES:
        raise _too_large(sql, f"has {values:,} values in lists", MOST_VALUES)


def _as_count(token: Token) -> float:
    """Return a number, or a text that a function would convert to a large number; 0 for all other tokens."""
    if token.kind == "number":
        return float(token.text) if len(token.text) <= _DIGITS_OF_A_NUMBER else inf
    digits = token.text[1:-1] if token.kind in ("text", "quoted") else ""
    return (
        float(digits)
        if digits.isascii() and digits.isdigit() and _DIGITS_OF_A_COUNT < len(digits) <= _DIGITS_OF_A_NUMBER
        else 0.0
    )


def _too_large(sql: str, found: str, most: int) -> InvalidInput:
    return InvalidInput(
        f"The SQL {sql[:100]!r}... {found}, and {most:,} is the limit: evaluating more could end the process. Store "
        "the value in a column of the table, list constants as in id IN (1, 2, 3), or split the condition into several "
        "runs."
    )
