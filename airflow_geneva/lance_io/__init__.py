"""The only door to pylance: its errors, its files."""
