"""Prepare a cluster for jobs: render its roles and queues, and find what it lacks."""
