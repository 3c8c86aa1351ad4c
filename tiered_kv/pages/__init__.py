"""Pages outside VRAM, and orders: resident in CPU memory, stored on SSD, or being moved."""
