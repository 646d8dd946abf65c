"""Save and restore training state: staging, assembly across nodes, resume, random states."""
