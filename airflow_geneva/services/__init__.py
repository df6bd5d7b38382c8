"""What calls of model services need: limits on them, and what they used."""
