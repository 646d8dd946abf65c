"""The answers of the specification's own API, message by message. What makes them is in `api.v1`.

Nothing is made of these classes: they are read when the document is asked for. Fields are in the order of the answers; one
with a default may be left out. Times are milliseconds since 1970 UTC.
"""
