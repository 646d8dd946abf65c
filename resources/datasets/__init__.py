"""The control plane's dataset versions: check verdicts, deletion, diff, prepared versions, features."""
