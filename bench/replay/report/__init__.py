"""Report of a comparison: what its runs come to, in words, tables and drawings."""
