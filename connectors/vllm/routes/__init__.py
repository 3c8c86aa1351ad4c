"""Routes of the API server that report the scheduler half's state, and their path to it."""
