"""The product on states of earlier releases, which are in `tests/fixtures`."""
