"""Make computed rows visible: verify staged files, commit them, and retry on conflicts."""
