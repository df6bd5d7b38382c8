"""Make computed rows visible: verify staged files, commit them, retry on conflicts."""
