"""Measurements against others and of ourselves. `make bench` and `make bench-tracking` run them."""
