"""Routes of the API server that report the scheduler half's state, and the calls by which they
query the engines."""
