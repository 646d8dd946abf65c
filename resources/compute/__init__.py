"""Compute backends: the only place that starts a program.

`base` is the contract, `backends` opens the backend named by `scheduler.backend`, and each backend is a folder: `local`
runs jobs as process groups on this machine, `kubernetes` as Kubernetes objects. To add one, make a folder here whose module
`backend` has `open_backend(settings, credentials) -> Compute`; the backend issues and revokes a job's token through
`credentials`. Only `run_launcher`, the old import address of a moved module, imports Dagster.
"""
