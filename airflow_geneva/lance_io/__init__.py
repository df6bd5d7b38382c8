"""The only package that uses pylance's files, transactions and errors directly."""
