"""Steps of the engine, as the trace tells them."""
