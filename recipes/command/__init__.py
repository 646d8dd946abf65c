"""Run a user's own script as a job (rows G2, H6).

The script gets a folder with its source files, a checkpoint folder that outlives restarts and the machine, its dataset and
its tracking run, all through environment variables. A script that ends by a signal is restarted; its own error is not
retried.

`program` runs it; `workspace` prepares its folders and environment; `process` starts and stops it. `folder_scan` finds what
lies in its checkpoints folder, `snapshot_publisher` decides when that is published, `snapshot_copy` copies and
`snapshot_store` stores it; `nodes` and `multi_node_publisher` do the same for several nodes.
"""
