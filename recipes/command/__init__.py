"""Run a user's own script as a job.

The script receives a folder with its source files, a checkpoint folder that survives restarts and a change of machine, its
dataset and its tracking run, all through environment variables. A script that is ended by a signal is restarted; an error of
its own is not retried.

`program` runs the script; `workspace` prepares its folders and environment; `process` starts and stops it. `folder_scan`
lists the contents of its checkpoints folder, `snapshot_publisher` decides when they are published, `snapshot_copy` copies
and `snapshot_store` stores them; `nodes` and `multi_node_publisher` do the same for several nodes.
"""
