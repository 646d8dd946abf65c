"""The calls that clients make thousands of times, without what makes a route comfortable: `writes` log, `reads` ask.

What is usual takes the short way; everything else goes on to the route of the same path in `api.mlflow`, so that there is
one set of rules and one set of messages.
"""
