"""Making a dataset version of another: what happens to each record, and how many processes share the work.

The work is cut into ranges of the input and parts of the output, never by the number of workers: one unit of work is a
function from its number to its files, so that the same input and configuration give the same bytes on any number of
processes, and a preparation that was killed goes on with the units that it had not done.
"""
