"""Save and restore training state: staging, schedule, assembly across nodes, resume point."""
