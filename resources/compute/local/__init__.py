"""Local backend: each job is a process group that outlives its supervisor.

`backend` implements the contract, `admission` decides which job starts next and leases GPUs by lock files (`leases`),
`capacity` counts slots and GPUs, `restarts` decides whether another attempt follows, `command` builds the command line,
`work_folder` keeps a job's files and enforces `schedule.max_duration`.
"""
