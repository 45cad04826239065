"""The replica: a local copy of a topic that answers queries over HTTP, also while the broker is down. It uses the
broker only as a client."""
