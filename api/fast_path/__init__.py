"""Fast path of calls that clients make thousands of times: `writes` log, `reads` read runs, metrics and experiments."""
