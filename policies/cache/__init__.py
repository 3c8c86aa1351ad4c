"""Pages in CPU memory: which go, which come back, and how."""
