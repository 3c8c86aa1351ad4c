"""Work between turns: deciding where KV is kept, estimating the costs, and carrying the decision
out."""
