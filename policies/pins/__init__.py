"""Values of pins, and the order in which pins are released."""
