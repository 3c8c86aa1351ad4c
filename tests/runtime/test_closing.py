"""When an engine stops, orders in flight are finished, pages are written to SSD, and all resources
are released."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.runtime.conftest import MakeRig
from tests.runtime.pages.test_lower_tiers import ask_again, tiers
from tests.runtime.stories.test_tiers import CONTEXT
from tiered_kv.connectors.runtime.tool_reader import THREAD_NAME, ToolReader
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.faults import FaultyTransfer
from tiered_kv.testing.vllm.rig import Rig
from tiered_kv.transfer.base import Direction


@pytest.fixture
def rig(make_rig: MakeRig, tmp_path: Path) -> Rig:
    return make_rig(extra=tiers(tmp_path, slots=200), max_batched_tokens=512)


def test_a_copy_that_failed_is_not_flushed(rig: Rig, make_rig: MakeRig, tmp_path: Path) -> None:
    """After a failed copy, the slot still has the bytes of its previous page. They are not written
    to SSD under the new page's key."""
    rig.inject(FaultyTransfer).fail_next(Direction.SAVE, {3, 4})
    rig.ask("first", CONTEXT)
    assert rig.count("save_failures") == 2
    rig.close()

    second = make_rig(extra=tiers(tmp_path, slots=200))
    ask_again(second)
    assert second.count("prompt_tokens_ssd") == 3 * 16


def test_a_copy_in_flight_is_awaited_and_flushed(
    rig: Rig, make_rig: MakeRig, tmp_path: Path
) -> None:
    backend = rig.inject(FaultyTransfer)
    backend.hold(Direction.SAVE)
    rig.add("first", CONTEXT)
    rig.step()
    assert backend.held > 0
    rig.close()

    second = make_rig(extra=tiers(tmp_path, slots=200))
    ask_again(second)
    assert second.count("prompt_tokens_ssd") >= 304


def test_a_jobs_last_tokens_are_found_on_ssd_by_the_next_engine(
    rig: Rig, make_rig: MakeRig, tmp_path: Path
) -> None:
    job = {"job_id": "job"}
    prompt = CONTEXT + text(9, seed=2)
    answer = rig.ask("t1", prompt, params=job)
    rig.close()

    second = make_rig(extra=tiers(tmp_path, slots=200))
    longer = prompt + answer + text(20, seed=3)
    assert second.ask("t2", longer, params=job) == expected(longer, 4)
    assert second.count("prompt_tokens_ssd") == len(prompt + answer) - 1
    second.pins.release_all()
    second.check_clean()


def test_the_slab_is_freed(rig: Rig) -> None:
    pool = rig.worker_half.pool
    rig.ask("first", CONTEXT)
    rig.close()
    assert pool.slots.size == 0
    rig.close()


def test_the_thread_that_reads_tool_calls_ends(make_rig: MakeRig) -> None:
    rig = make_rig(tools=ToolReader(lambda: None))
    threads = [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
    assert threads
    rig.close()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
