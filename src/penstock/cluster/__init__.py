"""A cluster: nodes that share one log in an object store.

The log is a sequence of records at consecutive positions. Appending creates the object of a position if there is none,
so of several nodes one succeeds. Everything else follows from the order of the records:

    record        the bytes of a record
    place         which records are valid: the same for everyone who reads in order
    follower      reads in order, and follows a leader's connection
    take_over     appends the LEAD record that makes a node the leader
    leader        appends rounds, several in flight, and commits them without gaps
    checkpoint    what a node needs to begin in the middle, and the trim mark
    trim          stores the mark, then deletes
    node          a node: one of these roles at a time
    actions       what these ask for, and the answers
    shared_log    the log in an object store
    runner        runs a node on it, in an event loop

All but the last two are without I/O, clock and randomness: events in, actions out.
"""
