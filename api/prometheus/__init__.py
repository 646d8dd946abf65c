"""Prometheus: what this process measures (requests) and what the database knows (totals), on a port of its own (page)."""
