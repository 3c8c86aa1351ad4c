"""Routes of the API server that tell what the scheduler half holds, and their way to it."""
