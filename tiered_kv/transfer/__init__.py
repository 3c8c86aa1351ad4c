"""Moving pages between VRAM and CPU slots."""
