"""Text of a wanted number of tokens, for a model whose tokenizer is not known.

Common English words are one token each for nearly every tokenizer; how many exactly is measured
with one request to the server.
"""

from __future__ import annotations

import hashlib

import numpy as np

_COMMON = (
    "time year people way day man thing woman life child world school state family student "
    "group country problem hand part place case week company system program question work "
    "number night point home water room mother area money story fact month lot right study "
    "book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city name team minute idea body back parent face level "
    "office door health person art war history party result change morning reason research "
    "girl guy moment air teacher force field paper ground letter window river table market "
    "report figure music price season picture island animal summer garden winter science "
    "engine bridge forest record station village"
)
WORDS = tuple(_COMMON.split())
"""Words that texts are made of."""


def filler(key: str, words: int) -> str:
    """Make a text of so many words, drawn by ``key``. Two texts of one key are equal as far as the
    shorter goes."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    drawn = np.random.default_rng(seed).integers(len(WORDS), size=words)
    return " ".join(WORDS[at] for at in drawn)
