"""Benchmarks against other tools and of this product; see `make bench` and `make bench-tracking`."""
