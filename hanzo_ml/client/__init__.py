"""The client library for training scripts.

It imports mlflow and httpx only when a run starts.
"""
