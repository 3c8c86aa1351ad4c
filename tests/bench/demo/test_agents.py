from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.demo.results import turn_result
from tiered_kv.bench.demo.agents import JobPlan, differing_answers, make_jobs, source_files


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three source files of numbered lines."""
    paths = [tmp_path / f"module_{i}.py" for i in range(3)]
    for path in paths:
        path.write_text("".join(f"{path.stem}_{line} = {line}\n" for line in range(200)))
    return paths


def test_same_seed_gives_the_same_jobs(files: list[Path]) -> None:
    assert make_jobs(JobPlan(seed=3), files) == make_jobs(JobPlan(seed=3), files)
    assert make_jobs(JobPlan(seed=3), files) != make_jobs(JobPlan(seed=4), files)


@given(
    jobs=st.integers(1, 9),
    turns=st.integers(1, 9),
    seed=st.integers(0, 99),
    chars=st.tuples(st.integers(50, 500), st.integers(0, 500)),
)
def test_jobs_keep_to_their_plan(
    tmp_path_factory: pytest.TempPathFactory,
    jobs: int,
    turns: int,
    seed: int,
    chars: tuple[int, int],
) -> None:
    path = tmp_path_factory.getbasetemp() / "source.py"
    path.write_text("value = 1\n" * 300)
    limits = (chars[0], chars[0] + chars[1])
    plan = JobPlan(jobs=jobs, turns=turns, seed=seed, result_chars=limits, gap_s=(0.2, 0.4))
    made = make_jobs(plan, [path])
    assert len({job.job_id for job in made}) == len(made) == jobs
    for job in made:
        assert len(job.steps) == turns
        assert all(0.2 <= step.gap_s <= 0.4 for step in job.steps[1:])
        assert 0 <= job.steps[0].gap_s <= plan.start_s
        first, *later = (len(step.message) for step in job.steps)
        assert all(chars <= limits[1] + 100 for chars in later)
        assert first <= plan.first_results * (limits[1] + 100)


def test_a_tool_result_is_whole_lines_of_the_file_it_names(files: list[Path]) -> None:
    texts = {path.name: path.read_text().splitlines() for path in files}
    for job in make_jobs(JobPlan(), files):
        results = [part for step in job.steps for part in step.message.split("\n\n")]
        assert len(results) == JobPlan().first_results + JobPlan().turns - 1
        for result in results:
            head, *body, question = result.splitlines()
            name = head.split("'")[1]
            first = int(head.split("line=")[1].split(")")[0]) - 1
            assert body == texts[name][first : first + len(body)]
            assert body
            assert question.endswith("?")


def test_no_files_is_refused() -> None:
    with pytest.raises(ValueError, match="no files"):
        make_jobs(JobPlan(), [])


def test_agents_read_this_project_and_the_standard_library() -> None:
    names = [path.name for path in source_files()]
    assert "agents.py" in names
    assert "argparse.py" in names
    assert len(names) >= 30


def test_differing_answers_are_counted_with_their_jobs() -> None:
    first = [turn_result("a", 1, text="x"), turn_result("a", 2, text="y"), turn_result("b", 1)]
    second = [turn_result("b", 1), turn_result("a", 2, text="Y"), turn_result("a", 1, text="X")]
    assert differing_answers(first, second) == (2, 1)
    assert differing_answers(first, first) == (0, 0)
