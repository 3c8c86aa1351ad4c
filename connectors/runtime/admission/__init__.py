"""Room for new jobs: who has started, who is held, and in which order they go on."""
