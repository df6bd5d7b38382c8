"""Which rows of a table are duplicates of each other: equal values, and similar texts."""
