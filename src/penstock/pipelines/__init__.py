"""Pipelines: topics through Spark as a file describes, on top of the source and the sink in `penstock.spark`."""
