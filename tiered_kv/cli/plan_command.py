"""``tiered-kv plan``: what a server of a model would hold, and the flags to start it with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiered_kv.config import TierConfig
from tiered_kv.sizing.gpus import GIB, GPUS, UTILISATION, find_gpu
from tiered_kv.sizing.model_shape import read_shape
from tiered_kv.sizing.tier_plan import Setup, make_plan

from .plan_report import (
    GROUP_COLUMNS,
    TIER_COLUMNS,
    assumptions,
    describe_plan,
    duration,
    group_rows,
    heading,
    tier_row,
)
from .serve_line import arguments, environment, in_shell
from .terminal import AsJson, one_sentence, print_json, print_table

CONTEXT = 32_768
"""Tokens of a job's context, unless the model's end sooner: a coding agent's after a while."""
CPU_GIB = TierConfig().cpu_gib
"""CPU memory for KV that the connector takes by default, GiB."""
SSD_GBPS = 3.0
"""GB/s that reads of an SSD reach, unless told: three quarters of four lanes of PCIe 3."""


def plan_command(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="Folder with a config.json, or such a file."),
    ],
    gpu: Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(GPUS)}.")],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs, by tensor parallelism.")] = 1,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Jobs at the same time, running or waiting.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="TOKENS", help=f"Tokens of a job's context; {CONTEXT:,} by default."
        ),
    ] = None,
    cpu_gib: Annotated[
        float | None,
        typer.Option(min=0, help=f"CPU memory for KV; by default what --jobs need, or {CPU_GIB:g}"),
    ] = None,
    ssd_gib: Annotated[float, typer.Option(min=0, help="SSD for KV.")] = 0.0,
    ssd_gbps: Annotated[
        float,
        typer.Option(min=0.01, help="Speed of its reads, GB/s; tiered-kv doctor tells it."),
    ] = SSD_GBPS,
    dtype: Annotated[str, typer.Option(help="As vLLM's --dtype.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="As vLLM's --kv-cache-dtype.")] = "auto",
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(min=0.05, max=1, help=f"Share of VRAM for vLLM; {UTILISATION} by default."),
    ] = None,
    weights_gib: Annotated[
        float | None, typer.Option(min=0.001, help="Size of the weights, if it is known.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what VRAM, CPU memory and SSD would hold of a model's KV, how long it takes to restore
    and to compute, and the flags to serve it with. Reads the model's files; needs no GPU.

    Exit code 2 if the model cannot be read or does not fit.
    """
    with one_sentence():
        gpu = find_gpu(gpu)
        shape = read_shape(
            model,
            gpu=gpu,
            ranks=gpus,
            dtype=dtype,
            kv_dtype=kv_dtype,
            weight_bytes=weights_gib * GIB if weights_gib is not None else None,
        )
        setup = Setup(
            gpu=gpu,
            context=context or min(CONTEXT, shape.max_len),
            jobs=jobs,
            cpu_gib=cpu_gib,
            ssd_gib=ssd_gib,
            ssd_gbps=ssd_gbps,
            utilization=gpu_memory_utilization or UTILISATION,
        )
        plan = make_plan(shape, setup, CPU_GIB)
    variables = environment(plan.cpu_gib, ssd_gib)
    words = arguments(
        model,
        ranks=gpus,
        ssd=ssd_gib > 0,
        dtype=dtype,
        kv_dtype=kv_dtype,
        utilization=gpu_memory_utilization,
    )
    if as_json:
        print_json(describe_plan(plan, variables, words))
        return
    for line in heading(plan):
        typer.echo(line)
    typer.echo()
    print_table(GROUP_COLUMNS, group_rows(plan))
    typer.echo()
    print_table(TIER_COLUMNS, [tier_row(tier) for tier in plan.tiers])
    typer.echo()
    if plan.pin_s is not None:
        typer.echo(f"A pin in full VRAM beats CPU memory up to {duration(plan.pin_s)}.")
    for sentence in (*plan.notes, *assumptions(plan)):
        typer.echo(sentence)
    typer.echo(f"\n{in_shell(variables, words)}")
