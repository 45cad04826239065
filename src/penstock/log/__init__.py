"""The log of a partition: segments of batches, their recovery, and the marks that say what is readable and durable."""
