"""Tool calls: parsed from answers, and how long they run."""
