"""The engine answers requests with arbitrary ids, and clients with different salts never share a
job."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.arbitrary_ids import anything
from tests.runtime.between_turns.waiting import policy, waiting_rig
from tests.runtime.conftest import MakeRig
from tiered_kv.connectors.runtime import job_table
from tiered_kv.testing.checked_kv import expected, text

REQUESTS, MOST_JOBS = 20, 5


@pytest.mark.scripts(4, nightly=1_000)
def test_arbitrary_ids_change_no_answer_and_cross_no_salt(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    monkeypatch.setattr(job_table, "MAX_JOBS", MOST_JOBS)
    rig = waiting_rig(make_rig, tmp_path)
    for seed in seeds:
        rng = random.Random(seed)
        for number in range(REQUESTS):
            prompt, salt = text(rng.randrange(1, 80), seed=number), rng.choice([None, "one", "two"])
            name = rng.choice(["resp_", "chatcmpl-"]) + f"{seed}a{number}-0123abcd"
            after = {"follows": f"resp_{seed}a{number - 1}", "session": rng.choice([1, None])}
            said = {"client": after} if rng.random() < 0.3 else anything(rng)
            params = said if isinstance(said, dict) else {}  # vLLM refuses other types
            before = len(policy(rig).asked)
            assert rig.ask(name, prompt, params=params, salt=salt) == expected(prompt, 4)
            rig.now += 1.0
            for end, _ in policy(rig).asked[before:]:
                assert end.job is None or end.job.salt == (salt or "")
            manager = rig.half.gaps.manager
            assert max(len(manager.jobs), len(manager.responses)) <= MOST_JOBS
    rig.half.release_all()
    rig.check_clean()
