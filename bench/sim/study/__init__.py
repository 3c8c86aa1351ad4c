"""Studies: servers compared on simulated machines, with figures, reports and drawings."""
