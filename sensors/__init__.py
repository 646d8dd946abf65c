"""Dagster sensors, one module per automation.

A sensor reads state or new events from the database, decides, and requests runs. Resetting a cursor is safe: each decision
checks the state that its event led to, and Dagster starts a run key only once.
"""
