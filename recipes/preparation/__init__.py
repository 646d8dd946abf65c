"""Prepare a dataset version from another: per-record processing, distributed over processes and pods.

Work is divided into ranges of the input and parts of the output, independent of the number of workers. A unit of work is a
function from its number to its files, so that equal input and configuration give equal bytes on any number of processes, and
a killed preparation resumes with the units that are not done.
"""
