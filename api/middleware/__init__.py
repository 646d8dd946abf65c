"""ASGI middleware that every request passes: validation of hosts, access control, normalization."""
