"""A trace as one HTML page: a lane for each job, tiers over time, distributions, and the worst
turns.
"""
