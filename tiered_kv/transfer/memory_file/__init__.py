"""Files of CPU memory that outlive their engine: their format, opening, headers and listing."""
