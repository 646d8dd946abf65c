"""Processes of the embedded stack: services, start and stop, reset."""
