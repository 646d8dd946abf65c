"""ASGI middleware of all requests: host validation, access control, normalization."""
