"""Recordings of agents' sessions in third-party formats."""
