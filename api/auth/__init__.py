"""Who may do what. `api.middleware.access_control` stands in front of every route and decides with these modules:

authentication (who is calling: tokens, jwks, job_tokens) · permissions (what a role may do) · route_matching (which route a
request takes, and what that declares) · object_references and ownership (which objects it names, and whose they are) ·
audit_log (the record of calls).
"""
