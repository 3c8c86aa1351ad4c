"""Snapshots of jobs: their KV cache as a folder or a zip, taken out of a server and put back."""
