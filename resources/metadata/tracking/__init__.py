"""Experiments, runs and logged models: what is known of each, and how it is found. `tracking` is all of it as one object."""
