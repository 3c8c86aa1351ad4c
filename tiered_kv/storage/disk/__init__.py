"""Access to the disk: files, folders and aligned memory."""
