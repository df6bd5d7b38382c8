"""Write one dense data file per fragment."""
