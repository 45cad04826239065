"""The consumer application: a copy of a topic on this machine, which answers queries over HTTP, also while the broker
is away. It knows the broker only as a client does."""
