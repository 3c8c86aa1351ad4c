"""Where pages are kept outside VRAM."""
