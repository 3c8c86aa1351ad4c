"""One model in a process of its own: ``python -m tests.e2e.mixed_prefix NAME FOLDER``.

VRAM holds the first half of a context, and the rest is restored from CPU memory. What the next turn
then finds and answers is compared with a hit in VRAM that was computed there. The result is written
to ``mixed.json`` in the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tiered_kv.bench.models.catalogue import MODELS
from tiered_kv.bench.models.child import Engines
from tiered_kv.bench.models.dense import AlignedContext
from tiered_kv.bench.models.engine.vram import unlike

COMPUTED, MIXED = "computed", "mixed"


def main(name: str, folder: Path) -> None:
    model = next(one for one in MODELS if one.name == name)
    engines = Engines(model, folder)
    with engines.started(connector=True, prefix_cache_retention_interval=None) as asker:
        case = AlignedContext(asker)
        case.begin(asker, [COMPUTED])
        hit = case.go_on(asker, COMPUTED)
        case.begin(asker, [MIXED])
        asker.evict_vram()
        half = case.tokens // 2 // asker.alignment * asker.alignment
        asker.ask(case.context[: half + 1], MIXED, 1)
        mixed = case.go_on(asker, MIXED)
        found = {
            "groups": [group.words for group in asker.groups],
            "context": case.tokens,
            "hit": hit.source.local,
            "half": half,
            "local": mixed.source.local,
            "restored": mixed.source.restored,
            "unlike": unlike(hit.found, asker.began(mixed, hit.source.found)),
            "same": mixed.says_the_same(hit),
        }
    (folder / "mixed.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
