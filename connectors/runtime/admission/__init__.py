"""Admission of new jobs: which jobs are active or held back, and in which order requests run."""
