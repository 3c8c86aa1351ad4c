"""Studies: servers under loads, their cells, figures and reports."""
