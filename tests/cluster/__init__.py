"""A real Kubernetes cluster on one machine, for tests. See `cluster.py`; `python -m tests.cluster --help`."""
