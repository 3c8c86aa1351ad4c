"""Transfer of pages between VRAM and CPU slots."""
