"""Work between turns: the decision where KV is kept, its costs, and carrying it out."""
