"""Authentication and authorization, enforced for every route by `api.middleware.access_control`.

`authentication` finds the caller (by `sign_in_tokens`, `job_tokens` and `program_tokens`), `permissions` maps roles to
permissions, `route_matching` finds the route of a request and its declaration, `ownership` the objects that it names and
their organization; `audit_log` records the call, and `local_peer` identifies callers on this machine. `default_experiment`
gives each organization its own experiment 0.
"""
