"""The registry: tells each broker of a tree where it stands, from a file that people write."""
