"""Tests of the tiers below CPU memory, as the scheduler half uses them."""
