"""Snapshots of jobs: their KV cache as a folder or a zip file, exported from or imported into a
server."""
