"""Codecs: how a page's bytes become fewer on SSD. ``base`` is the contract."""
