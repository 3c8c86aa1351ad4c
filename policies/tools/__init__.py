"""Tool calls: parsers of the calls in answers, and rules for how long the tools run."""
