"""Pins that give way, and the order in which they do."""
