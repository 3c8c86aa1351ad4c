"""A trace as one HTML page: lanes of jobs, tiers over time, distributions, worst turns."""
