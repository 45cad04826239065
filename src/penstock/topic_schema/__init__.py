"""The schema of a topic's values: one tree of types, read from and written as JSON Schema and Spark DDL."""
