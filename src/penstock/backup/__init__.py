"""Backup and restore: segments and manifests in a directory, a tar stream or an object store."""
