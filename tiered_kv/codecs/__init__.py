"""Codecs, which compress pages for SSD and other stores. ``base`` is the contract."""
