"""Pages outside VRAM: their states in CPU memory and in lower tiers, and the orders that move
them."""
