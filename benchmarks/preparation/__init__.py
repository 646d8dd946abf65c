"""The whole preparation, side by side with the same pipeline written with `datasets.map`, and with its floors."""
