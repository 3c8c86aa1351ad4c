"""Views of the scheduler half for operators: read only, as JSON."""
