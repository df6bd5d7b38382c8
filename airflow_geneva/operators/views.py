"""Create materialized views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context

from airflow_geneva.engine import api
from airflow_geneva.engine.display import counted
from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators._lance_task import (
    Configuration,
    LanceOperator,
    load_named_udf,
    open_patiently,
    optional_int,
    optional_text,
    parse_bool,
    parse_json,
    push_error_to_xcom,
    required_text,
)

if TYPE_CHECKING:
    from airflow_geneva.database import Database
    from airflow_geneva.engine.udf.expect import Expectation
    from airflow_geneva.query import Query


class CreateMaterializedViewOperator(LanceOperator):
    """Create a materialized view, unless there is one with this definition already.

    No UDF runs: a refresh does that. A view with the same definition is left unchanged, even if the code of its UDFs
    changed; `on_code_change` of a refresh handles that. For a view with another definition the task fails and says what
    changed, or with `recreate` it drops the view and creates it again; then the view is empty until its first refresh.

    Args:
        view: the view's name.
        table: name of its source table or view; needed without `source_query`.
        where: SQL filter, or None.
        select: names of columns; or columns by name: a column's name or an SQL expression as text, or
            `{"udf": "module:name", "inputs": [...]}`, where `inputs` is optional. None: all columns. JSON text is
            accepted, for templates.
        add_columns: more columns by name, as for `select`, or as JSON text.
        group_by: the columns, as a list or JSON text, whose values make a group of rows: one row for each; None:
            the rows are those of the table.
        agg: with `group_by`, the columns of the groups by name: an SQL aggregate as text, or a UDF as for `select`,
            which is called once per group. JSON text is accepted, for templates.
        order_by: with `group_by`, the columns by which the rows of a group are sorted, each perhaps followed by `desc`.
        max_group_rows: with `group_by`, the most rows that a group may have; None: any number.
        explode: a list column whose elements become rows; None: none.
        deduplicate: keep one row of each cluster of duplicates: the arguments of
            :meth:`airflow_geneva.query.Query.deduplicate` by name, such as `{"on": "text", "method": "minhash"}`, or as
            JSON text. None: keep all rows.
        shuffle_seed: shuffle the rows by this seed; None: no shuffle.
        limit: maximum number of rows, or None.
        offset: rows to skip first.
        recreate: drop a view with another definition.
        max_rows_per_fragment: rows of each fragment of the view; None: 1,048,576.
        source_database: URI of the source's database, opened with the same connection; None: the view's database.
        source_query: the whole query as JSON text, instead of the arguments from `table` to `offset`: the form of a
            request that another program makes, see `airflow_geneva.namespace.read_query`. Its functions are imported
            only if the source of their module makes UDFs of these names.
        output_schema: the expected columns of `source_query`, an Arrow schema in base64; empty: any.
        expect: conditions on values, by column, from `airflow_geneva.expect`; values that violate them do not become
            visible. If they differ from those of an existing view, the view's conditions are changed. None keeps the
            view's conditions.
        key: the column, or several, as a list or JSON text, whose values name rows in errors: columns that the query
            takes as they are. If an existing view has another key, it gets this one. None: the key of the source, and
            an existing view keeps its own.

    Example:
        ```python
        CreateMaterializedViewOperator(
            task_id="define",
            view="long_docs",
            table="docs",
            where="length(text) > 1000",
            select={"id": "id", "e": {"udf": "my_project.udfs:embed", "inputs": ["text"]}},
        )
        ```
    """

    template_fields: Sequence[str] = (
        *LanceOperator.template_fields,
        *("view", "table", "where", "select", "add_columns", "shuffle_seed", "limit", "offset", "recreate"),
        *("explode", "deduplicate", "max_rows_per_fragment", "source_database", "source_query", "output_schema", "key"),
        *("group_by", "agg", "order_by", "max_group_rows"),
    )

    def __init__(
        self,
        *,
        view: str,
        table: str | None = None,
        where: str | None = None,
        select: Sequence[str] | Mapping[str, Any] | str | None = None,
        add_columns: Mapping[str, Any] | str | None = None,
        explode: str | None = None,
        deduplicate: Mapping[str, Any] | str | None = None,
        shuffle_seed: int | str | None = None,
        limit: int | str | None = None,
        offset: int | str | None = None,
        recreate: bool | str = False,
        max_rows_per_fragment: int | str | None = None,
        source_database: str | None = None,
        source_query: str | None = None,
        output_schema: str | None = None,
        expect: Mapping[str, Expectation | Sequence[Expectation]] | None = None,
        key: str | Sequence[str] | None = None,
        group_by: Sequence[str] | str | None = None,
        agg: Mapping[str, Any] | str | None = None,
        order_by: Sequence[str] | str | None = None,
        max_group_rows: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.view = view
        self.group_by = group_by
        self.agg = agg
        self.order_by = order_by
        self.max_group_rows = max_group_rows
        self.table = table
        self.where = where
        self.select = select
        self.add_columns = add_columns
        self.explode = explode
        self.deduplicate = deduplicate
        self.shuffle_seed = shuffle_seed
        self.limit = limit
        self.offset = offset
        self.recreate = recreate
        self.max_rows_per_fragment = max_rows_per_fragment
        self.source_database = source_database
        self.source_query = source_query
        self.output_schema = output_schema
        self.expect = expect
        self.key = key

    def execute(self, context: Context) -> dict[str, Any]:
        from airflow_geneva.view import View

        with push_error_to_xcom(context):
            database, name = self.open_database(), required_text("view", self.view)
            made, key = self._create(database, name), self._key
            if self.expect is not None:
                View(database.location(name)).expect(self.expect)
            if key is not None:
                View(database.location(name)).set_key(key)
            return made

    @property
    def _key(self) -> str | Sequence[str] | None:
        if not isinstance(self.key, str):
            return self.key
        text = optional_text(self.key)
        return parse_json("key", text) if text and text.startswith("[") else text

    def _create(self, database: Database, name: str) -> dict[str, Any]:
        from airflow_geneva.query import ROWS_PER_FRAGMENT

        query = self._query(database)
        rows = optional_int("max_rows_per_fragment", self.max_rows_per_fragment)
        rows = ROWS_PER_FRAGMENT if rows is None else rows
        if rows < 1:
            raise InvalidInput(f"max_rows_per_fragment={rows} is not valid: give a whole number of at least 1.")
        differences: list[str] = []
        if database.has_table(name):
            differences = self._compare(database, name, query)
            if not differences:
                self.log.info("View %s exists already, with this definition.", name)
                return {"view": name, "created": False, "differences": []}
            if not parse_bool("recreate", self.recreate):
                raise InvalidInput(
                    f"View {name!r} exists, with another definition: {'; '.join(differences)}. "
                    "Change the task back, give the view another name, or give recreate=True to drop it and compute it "
                    "again."
                )
            self._check(query, name)
            self.log.warning("View %s is dropped and created again: %s.", name, "; ".join(differences))
            database.drop_table(name)
        else:
            self._check(query, name)
        try:
            view = query.create_materialized_view(database, name, max_rows_per_fragment=rows, key=self._key)
        except (InvalidInput, OSError):
            if not database.has_table(name) or self._compare(database, name, query):
                raise
            self.log.info("Another process created view %s meanwhile, with this definition.", name)
            return {"view": name, "created": False, "differences": differences}
        if query.deduplication is None:
            self.log.info("View %s was created, with %s to compute.", name, counted(view.lance.count_rows(), "row"))
        else:
            self.log.info("View %s was created; its first refresh finds the rows that it keeps.", name)
        return {"view": name, "created": True, "differences": differences}

    def _check(self, query: Query, name: str) -> None:
        """Refuse expectations and a key that do not fit before a view is dropped or created."""
        if self.expect is not None:
            query.definition().expecting(self.expect, query.output_schema(), name)
        if self._key is not None:
            query.definition().check_key(self._key, query.output_schema(), name)

    def _query(self, database: Database) -> Query:
        if (text := optional_text(self.source_query)) is not None:
            return self._requested_query(database, text)
        place = optional_text(self.source_database)
        source = database if place is None else open_patiently(self.lance_conn_id, place)
        query = source.open_table(required_text("table", self.table)).query()
        where, seed = optional_text(self.where), optional_int("shuffle_seed", self.shuffle_seed)
        limit, offset = optional_int("limit", self.limit), optional_int("offset", self.offset)
        exploded = optional_text(self.explode)
        query = self._grouped(query if where is None else query.where(where))
        query = query if exploded is None else query.explode(exploded)
        if (deduplicate := parse_json("deduplicate", self.deduplicate)) is not None:
            query = query.deduplicate(**api.Deduplication.arguments(deduplicate))
        query = query if seed is None else query.shuffle(seed)
        query = query if limit is None else query.limit(limit)
        query = query if offset is None else query.offset(offset)
        select, more = parse_json("select", self.select), parse_json("add_columns", self.add_columns)
        if select is not None:
            query = query.select(_specs(select) if isinstance(select, Mapping) else select)
        if more and not isinstance(more, Mapping):
            raise InvalidInput(f"add_columns is {more!r:.200}. Give columns by name, as for select.")
        return query.add_columns(_specs(more)) if more else query

    def _grouped(self, query: Query) -> Query:
        keys, columns, order = (parse_json(name, getattr(self, name)) for name in ("group_by", "agg", "order_by"))
        most = optional_int("max_group_rows", self.max_group_rows)
        if not keys:
            if given := [name for name in ("agg", "order_by", "max_group_rows") if getattr(self, name)]:
                raise InvalidInput(f"{given[0]} is about groups of rows, and group_by is not given. Give it, too.")
            return query
        if isinstance(keys, str) or not isinstance(columns or {}, Mapping):
            raise InvalidInput(f"group_by={keys!r:.200} and agg={columns!r:.200}: give a list, and columns by name.")
        return query.group_by(*keys).agg(_specs(columns or {}), order or (), most)

    def _requested_query(self, database: Database, text: str) -> Query:
        from airflow_geneva.namespace import read_query

        for name in (
            "table",
            "where",
            "select",
            "add_columns",
            "explode",
            "deduplicate",
            "shuffle_seed",
            "limit",
            "offset",
            "source_database",
            "group_by",
            "agg",
            "order_by",
            "max_group_rows",
        ):
            if getattr(self, name) is not None:
                raise InvalidInput(f"source_query is the whole query, and {name} is given too. Leave one of them out.")
        from airflow_geneva.engine.udf.stored import udf_modules

        with udf_modules(Configuration.read().udf_modules):
            return read_query(database, text, optional_text(self.output_schema) or "")

    def _compare(self, database: Database, name: str, query: Query) -> list[str]:
        """Describe how the existing view differs from the requested one."""
        from airflow_geneva.view import View

        there = database.open_table(name)
        if not isinstance(there, View):
            raise InvalidInput(f"{name!r} is a table and not a view, so it is not changed. Choose another name.")
        found, wanted = there.view_definition, query.definition()
        gained = found.gained_columns(wanted)
        if gained:
            self.log.warning(
                "Table %s has gained the columns %s, which view %s of all its columns does not have; drop the view to "
                "have it created with them.",
                *(found.source_table, gained, name),
            )
        return found.differences(wanted)


def _specs(columns: Mapping[str, Any]) -> dict[str, api.QuerySpec]:
    return {name: _spec(name, given) for name, given in columns.items()}


def _spec(column: str, given: Any) -> api.QuerySpec:
    if isinstance(given, str):
        return given
    inputs = given.get("inputs") if isinstance(given, Mapping) else None
    known = isinstance(given, Mapping) and "udf" in given and given.keys() <= {"udf", "inputs"}
    if not known or isinstance(inputs, str) or not (inputs is None or isinstance(inputs, Sequence)):
        raise InvalidInput(
            f"Column {column!r} is given {given!r:.200}. Give a column's name or an SQL expression as text, or "
            '{"udf": "module:name", "inputs": ["input", ...]}.'
        )
    udf = load_named_udf(given["udf"])
    return udf if inputs is None else (udf, [str(name) for name in inputs])
