"""Observe mode: decisions are made and traced, but not carried out."""
