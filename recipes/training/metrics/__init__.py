"""Metrics of a training: what is measured, aggregated and logged."""
