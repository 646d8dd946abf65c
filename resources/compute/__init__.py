"""Running jobs. The only place that starts a program, and the only module of `resources` that may know Dagster.

`base` is the contract, `local` a subprocess on this machine. Kubernetes comes beside it as another `Compute`.
"""
