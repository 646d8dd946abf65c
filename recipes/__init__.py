"""What job pods run.

Recipe files, job types, and the programs prepare, split, train, evaluate, convert and command. Programs depend on
`recipes.contracts.job`, `recipes.storage.artifact_store` and libraries: a pod knows two addresses, the tracking URI and the
object store, and sees neither the metadata database nor a Dagster instance.
"""
