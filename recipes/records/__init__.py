"""Read, index, fingerprint and query the records of a dataset. Free of torch."""
