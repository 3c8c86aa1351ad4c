"""Files, folders and aligned memory: everything that touches the disk."""
