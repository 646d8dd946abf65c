"""One file for each automation. A sensor reads the event table with a cursor, decides purely, and requests runs.

A fresh or reset cursor launches nothing that is done: each decision looks at the state that the event led to, and each
request has a run key that Dagster honours once.
"""
