"""Read-only views of the scheduler half for operators, as JSON."""
