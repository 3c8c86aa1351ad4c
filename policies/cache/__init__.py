"""Pages in CPU memory: which pages are evicted, and how pages are restored."""
