"""Monitoring: heartbeats, run health alerts and usage totals."""
