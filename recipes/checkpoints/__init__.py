"""Checkpoints without torch: atomic commit, local and remote copies, retention, parts of several nodes."""
