"""The metadata database: the only thing that the API and the asset graph share.

`tracking` and `registry` are what MLflow's clients know, `datasets` and `jobs` a module each; sweeps are in
`resources.hpo.sweeps`. `tables`, `writes`, `filters` and `artifacts` are what they stand on. Each writes its event in the
`outbox`, in the same transaction as the change. Weights and other heavy bytes never enter it.
"""
