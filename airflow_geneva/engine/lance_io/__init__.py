"""How fragments, data files, history, conflicts and errors of Lance tables are read, for all other rooms."""
