"""Run a job for a column or a view. Read `pipeline` first: record, apply, commit, finish.

`inline` prepares the UDFs and computes a shard; `units` computes and stages one fragment. `column` and `view` hold the
differences between the two: a target reads, reuses and lays out rows, and a publisher makes them visible.
"""
