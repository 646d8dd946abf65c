"""Messages of /v1."""
