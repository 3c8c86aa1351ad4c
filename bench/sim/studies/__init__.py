"""Studies of one question each: what a part, a tier, a limit or a machine is worth."""
