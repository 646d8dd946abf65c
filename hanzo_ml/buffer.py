"""Import address of the metric buffer for training programs; see `hanzo_ml.client.buffer`."""

from hanzo_ml.client.buffer import MetricBuffer

__all__ = ["MetricBuffer"]
