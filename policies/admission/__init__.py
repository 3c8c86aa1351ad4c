"""Room for new jobs."""
