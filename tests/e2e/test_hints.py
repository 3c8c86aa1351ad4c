"""KV hints by every transport on a real server, and their effects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered_kv.bench.hints.__main__ import Size, measure
from tiered_kv.policies.jobs.kv_hints import Intent

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_hints_are_carried_out_and_reported_by_every_transport(
    small_model: Path, tmp_path: Path
) -> None:
    size = Size(tokens=512, pairs=2, calls=160, rounds=2, rate=10.0)
    found = measure(small_model, size, tmp_path, lambda _: None)

    assert [one for one in found["transports"] if not one["executed"]] == []
    assert {one["intent"] for one in found["transports"]} == {*Intent}
    assert found["executed"] == found["sent"]
    assert all(found["outcomes"].values()), found["outcomes"]

    assert found["prefetch"]["ssd_reads_after_arrival"] == 0
    release = found["release"]
    assert release["pages_released"] > 0
    assert release["pages"] > release["pages_shared"]
    assert (release["released_pages_left"], release["tokens_found_later"]) == (0, 0), release
    assert not release["job_left"]
    assert [one for one in found["revise"] if not one["as_said"]] == []

    abuse = found["abuse"]
    assert abuse["wrong"] == 0, abuse["wrong_first"]
    assert abuse["harmless"] > 0
    assert abuse["refused"] > 0
    assert (abuse["jobs_changed"], abuse["tokens_lost"], abuse["hook_errors"]) == (0, 0, 0)
