"""Experiments, runs and logged models. `tracking` combines all parts in one object."""
