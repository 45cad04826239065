"""The running broker: where the rooms are joined, and only there."""
