"""The metadata database: the only thing that the API and the asset graph share.

`tracking` and `registry` hold what MLflow's clients know; `datasets` and `jobs` are one module each; sweeps are in
`resources.hpo.sweeps`. All of them are built on `tables`, `writes`, `filters` and `artifacts`. Each change writes its event
to the `outbox` in the same transaction. Weights and other heavy bytes are never stored here.
"""
