"""Run a user's own script as a job (rows G2, H6).

The script gets a folder with its source files, a checkpoint folder that outlives restarts and the machine, its dataset and
its tracking run, all through environment variables. A script that ends by a signal is restarted; its own error is not
retried.

`program` runs it; `workspace` prepares its folders and environment; `process` starts and stops it. `snapshot_publisher`
decides when its checkpoints are published, `snapshot_copy` copies them, `snapshot_store` stores them; `nodes` and
`multi_node_publisher` do the same for several nodes.
"""
