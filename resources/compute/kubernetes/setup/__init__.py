"""Prepare a cluster for jobs: render roles and queues, and check what is missing."""
