"""Who may do what. `api.middleware.access_control` stands in front of every route and decides with these modules.

`authentication` finds the caller (by `user_tokens` and `job_tokens`), `permissions` says what a role may do,
`route_matching` which route a request takes and what that declares, `ownership` which objects it names and whose they
are; `audit_log` records the call, and `local_peer` identifies callers on this machine. `default_experiment` gives each
organization an experiment 0 of its own.
"""
