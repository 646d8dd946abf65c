"""Compute backends: the only place that starts a program.

`base` is the contract, `backends` finds the backend that `scheduler.backend` names, and each backend is a folder: `local`
runs jobs as process groups on this machine, `kubernetes` renders their objects. To add one, make a folder here whose module
`backend` has `open_backend(settings, credentials) -> Compute`. With `credentials` a
backend issues and revokes a job's token. Nothing here imports Dagster but `run_launcher`, the old address of a moved module.
"""
