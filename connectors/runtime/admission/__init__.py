"""Room for new jobs: who has begun, who is held, and in which order they go on."""
