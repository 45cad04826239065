"""The log: segments of batches, their recovery, and the flush rounds that make them durable."""
