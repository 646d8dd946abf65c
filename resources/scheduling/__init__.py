"""Scheduling policy: quotas of organizations."""
