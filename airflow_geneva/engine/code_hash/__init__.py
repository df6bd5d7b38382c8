"""Hash the code of UDFs, to detect whether it changed."""
