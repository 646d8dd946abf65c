"""What a GPU pod runs: recipe files, the schema of a job, and the programs prepare, split, train, evaluate and convert,
and `command`, which runs a script of the user's own.

A program stands on `recipes.contracts.job`, `recipes.storage.artifact_store` and libraries: a pod knows two addresses, the
tracking URI and the object store, and sees neither the metadata database nor a Dagster instance.
"""
