"""Checkpoints: atomic commit, local and remote copies, retention, parts of several nodes. Free of torch."""
