"""Trees of brokers: the place of a broker, and the pipes that copy topics between parent and child."""
