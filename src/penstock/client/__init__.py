"""The clients: one core without I/O (`protocol`, `feed`, `producer`), and two shells over it, `aio` and `sync`."""
