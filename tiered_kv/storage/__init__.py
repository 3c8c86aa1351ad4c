"""Storage of pages outside VRAM. ``base`` is the contract."""
