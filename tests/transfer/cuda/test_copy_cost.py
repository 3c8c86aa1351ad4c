"""Kernel or copy engines: the choice, with made-up measurements."""

from __future__ import annotations

import pytest

from tiered_kv.transfer.cuda.copy_cost import (
    LARGE_BYTES,
    MANY_RUNS,
    RUN_BYTES,
    CopyCost,
    kernel_pays,
    measure_cost,
)

KERNEL = CopyCost(begin_s=10e-6, run_s=0.08e-6, byte_s=1 / 50e9)
ENGINES = CopyCost(begin_s=12e-6, run_s=0.7e-6, byte_s=1 / 55e9)


def test_small_scattered_runs_are_the_kernels() -> None:
    assert kernel_pays(KERNEL, ENGINES, runs=80 * 256, nbytes=80 * 256 * 8192)


def test_large_runs_are_the_copy_engines() -> None:
    assert not kernel_pays(KERNEL, ENGINES, runs=256, nbytes=256 << 20)


def test_the_same_bytes_in_fewer_runs_change_the_choice() -> None:
    nbytes = 64 << 20
    assert [kernel_pays(KERNEL, ENGINES, runs, nbytes) for runs in (16, 16384)] == [False, True]


def test_a_kernel_that_is_hardly_faster_is_not_worth_its_multiprocessors() -> None:
    nearly = CopyCost(ENGINES.begin_s, ENGINES.run_s, 0.97 * ENGINES.byte_s)
    clearly = CopyCost(ENGINES.begin_s, ENGINES.run_s, 0.9 * ENGINES.byte_s)
    assert not kernel_pays(nearly, ENGINES, 1, 1 << 30)
    assert kernel_pays(clearly, ENGINES, 1, 1 << 30)


@pytest.mark.parametrize("cost", [KERNEL, ENGINES])
def test_three_copies_tell_what_copies_cost(cost: CopyCost) -> None:
    measured = measure_cost(lambda runs, nbytes: cost.seconds(runs, runs * nbytes))

    for runs, nbytes in ((1, RUN_BYTES), (MANY_RUNS, RUN_BYTES), (1, LARGE_BYTES)):
        expected = cost.seconds(runs, runs * nbytes)
        assert measured.seconds(runs, runs * nbytes) == pytest.approx(expected, rel=0.05)


def test_noise_does_not_make_copies_free_of_charge_or_worse() -> None:
    measured = measure_cost(lambda runs, nbytes: 5e-6 if nbytes == RUN_BYTES else 4e-6)
    assert measured == CopyCost(5e-6, 0.0, 0.0)
