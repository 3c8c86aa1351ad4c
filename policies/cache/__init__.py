"""Pages in CPU memory: which are evicted, and how they are restored."""
