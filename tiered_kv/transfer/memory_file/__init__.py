"""Files of CPU memory that outlive their engine: format, opening, slot headers and listing."""
