"""Access to the disk: files and aligned memory."""
