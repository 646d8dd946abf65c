"""Who may do what. One guard stands in front of every route; what it decides with lies beside it:

tokens and job_callers (who is calling) · keys (of the IAM that signed) · permissions (what a role may) · table (what a
route needs) · routes (which route a request takes) · references (which objects it names) · guard (puts them together).
"""
