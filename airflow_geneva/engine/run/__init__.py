"""How a job runs, of a column or a view alike. Read `pipeline` first: record, apply, commit, finish.

`inline` prepares the UDFs and computes a shard; `units` computes and stages one fragment. What differs is in `column`
and `view`: a target reads, reuses and lays out rows, a publisher makes them visible.
"""
