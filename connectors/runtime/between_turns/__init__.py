"""TurnEnds between turns: the decision, its price, and what follows from it."""
