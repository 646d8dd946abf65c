"""Dataset versions as the control plane manages them: check verdicts, deletion, diff, prepared versions, features."""
