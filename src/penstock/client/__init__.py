"""The clients: one core without I/O (`protocol`, `feed`, `batcher`), and two shells over it, `aio` and `sync`."""
