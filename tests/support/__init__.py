"""What several tests use: servers, clients, logs and brokers in memory, and programs that are killed."""
