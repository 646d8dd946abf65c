"""Controller of jobs on a cluster: `python -m resources.compute.kubernetes.controller`."""
