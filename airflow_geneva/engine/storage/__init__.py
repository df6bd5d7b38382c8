"""Where files lie, with whose credentials, and how long to wait for them."""
