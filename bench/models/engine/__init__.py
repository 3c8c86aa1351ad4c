"""An engine under test: what is asked of it, and what its scheduler and its memory say."""
