"""A trace as one page to look at: lanes of jobs, tiers over time, distributions, worst turns."""
