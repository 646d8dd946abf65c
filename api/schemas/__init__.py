"""Messages of requests and responses."""
