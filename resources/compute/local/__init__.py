"""The local backend: each job is a process group on this machine, which outlives its supervisor.

`backend` implements the contract, `admission` decides which job starts next and leases GPUs by lock files (`leases`),
`command` builds the command line, `time_limit` enforces `schedule.max_duration`, `work_folder` maps a job to its folder.
"""
