"""Pages and their orders: what is in CPU memory, what is on SSD, what is on its way."""
