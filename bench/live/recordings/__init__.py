"""Recordings of agents' sessions in the formats of others."""
