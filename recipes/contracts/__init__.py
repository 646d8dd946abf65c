"""Types exchanged between the control plane and a job's program."""
