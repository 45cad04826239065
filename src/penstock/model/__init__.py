"""Messages: subjects, headers, runs of messages, and batches, which are runs as bytes. No I/O."""
