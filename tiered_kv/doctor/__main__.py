"""``python -m tiered_kv.doctor``: checks this machine, and prints one line of JSON per finding.

``tiered-kv doctor`` runs this module in a separate process, because a call to a failed disk may
never return, and cannot be interrupted. Therefore the name of a group of checks is printed before
the group starts.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterable, Iterator

from tiered_kv.machine import system_memory, usable_cores

from .cold_memory import (
    HUGE_PAGES,
    check_cores,
    check_cpu_memory,
    check_huge_pages,
    check_locked_memory,
    check_spare_cores,
    count_gpus,
)
from .finding import BESIDE, Finding
from .installation import check_installation, check_remote
from .lmcache import check_lmcache
from .ssd_folder import check_ssd
from .variables import check_hash_seed, check_variables, read_settings


def groups(*, beside: bool) -> Iterator[tuple[str, Iterable[Finding]]]:
    """Yield groups of checks, by name. Checks that access a disk or a server run when their
    findings are requested.

    Args:
        beside: True if a server is already running on this machine.
    """
    env = dict(os.environ)
    yield "installation", check_installation(env)
    yield "settings", check_variables(env)
    yield "LMCache's settings", check_lmcache(env, max(1, count_gpus(env)))
    config = read_settings(env)
    gpus, usable = count_gpus(env), usable_cores()
    total, available = system_memory()
    yield "PYTHONHASHSEED", [check_hash_seed(env, config)]
    yield (
        "cores and memory",
        [
            check_cores(gpus, usable),
            check_cpu_memory(config, gpus, total, total if beside else available),
            check_locked_memory(config, gpus, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        ],
    )
    yield (
        "huge pages",
        map(check_huge_pages, [HUGE_PAGES]),
    )  # lazily, because the check reads a file
    yield "compression", [check_spare_cores(config, env, gpus, usable)]
    if config.ssd_path is not None or not env.get(
        "TIERED_KV_SSD_PATH"
    ):  # an invalid path is reported with the settings
        yield "SSD", check_ssd(config)
    yield "remote store", check_remote(config.remote)


def main() -> None:
    """Print each finding as soon as its check has finished."""
    for name, findings in groups(beside=BESIDE in sys.argv[1:]):
        print(json.dumps({"begins": name}), flush=True)
        for finding in findings:
            print(json.dumps(finding.to_json()), flush=True)


if __name__ == "__main__":
    main()
