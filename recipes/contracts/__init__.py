"""What crosses the border between a control plane process and a job's program, as plain types."""
