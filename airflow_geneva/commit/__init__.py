"""Make it visible: verify, replace, answer conflicts."""
