"""Record what has been computed: the checkpoint store, its keys, and the state of a column."""
