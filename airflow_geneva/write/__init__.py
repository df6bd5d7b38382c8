"""One dense data file per fragment."""
