"""/v1/datasets (rows B3-B10, B12, B19, S5)."""
