"""Penstock against the machine's own limit, the same bytes by hand, and against other servers under the same load:
in the same run, in the same directory.

`python -m bench` prints one table. Nothing here is a test: a shared machine is never the same twice, so only the
ratios mean something, and they are for a person to read.
"""
