"""What has been computed: the store, its keys, and the state of a column."""
