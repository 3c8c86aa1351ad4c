"""Playing jobs against a server, with recorded answers forced."""
