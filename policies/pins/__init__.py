"""Which pins give way, and in what order."""
