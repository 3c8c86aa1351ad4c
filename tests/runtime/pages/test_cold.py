"""CPU memory keeps pages compressed, and whoever comes back finds its own."""

from __future__ import annotations

import pytest

from tests.runtime.cold import SLOTS, cold_settings, come_back, fill_cpu
from tests.runtime.cold import small_bundles as small_bundles
from tests.runtime.conftest import MakeRig
from tiered_kv.testing.vllm.rig import Rig

pytestmark = pytest.mark.usefixtures("small_bundles")
JOBS = 10
"""Jobs whose pages are more than there are slots, and have room if they are compressed."""


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig(extra=cold_settings())


def test_more_pages_than_slots_are_held_and_all_of_them_are_right(rig: Rig) -> None:
    fill_cpu(rig, JOBS)
    print(len(rig.index), rig.index.num_slots, rig.count("pages_compressed"), len(rig.index.cold), rig.index.evictions)
    assert len(rig.index) > SLOTS
    for job in range(JOBS):
        print(job, come_back(rig, job), rig.count("restore_failures"), rig.index.evictions)
    rig.check_clean()
