"""Read fragments, data files, history, conflicts and errors of Lance tables, for the rest of the package."""
