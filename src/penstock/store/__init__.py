"""A data directory: the catalogue of its topics, the flush rounds of all logs, upkeep, snapshots and repair."""
