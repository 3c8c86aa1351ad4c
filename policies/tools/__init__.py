"""Tool calls: read from answers, and how long they run."""
