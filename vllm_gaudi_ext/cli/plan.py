"""`gaudi-ext plan`: what a deployment will need, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer


def _refuse(text: str) -> NoReturn:
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(2)


def _whole(option: str, text: str) -> Any:
    """An option that takes a whole number, and refuses anything else in one line."""

    def read(value: str | int) -> int:
        try:
            return int(value)
        except ValueError:
            _refuse(f"{option} must be a whole number, got {str(value)[:40]!r}")

    return typer.Option(help=text, parser=read, metavar="N")


def _number(option: str, text: str) -> Any:
    """An option that takes a number, and refuses anything else in one line."""

    def read(value: str | float) -> float:
        try:
            return float(value)
        except ValueError:
            _refuse(f"{option} must be a number, got {str(value)[:40]!r}")

    return typer.Option(help=text, parser=read, metavar="X")


def plan(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder or config.json, or a known model such as Qwen3.5-4B."),
    ] = None,
    serve: Annotated[
        Path | None,
        typer.Option(help="A serve.yaml to read everything from, with vLLM's own parser."),
    ] = None,
    platform: Annotated[
        str | None,
        typer.Option(help="gaudi2, gaudi3, a100, h100, h200, b200 or cpu."),
    ] = None,
    unit: Annotated[
        int | None, _whole("--unit", "Tokens that the block size is rounded up to.")
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="The drafter's folder, config.json or known name; or mtp; or none."),
    ] = None,
    drafts: Annotated[int | None, _whole("--drafts", "Draft tokens of one step.")] = None,
    tokens: Annotated[
        int | None, _whole("--tokens", "Prompt and output of one request; 8192 when not given.")
    ] = None,
    tp: Annotated[int | None, _whole("--tp", "Tensor-parallel cards.")] = None,
    ep: Annotated[bool | None, typer.Option("--ep/--no-ep", help="Expert parallelism.")] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="The KV cache's dtype, for example fp8.")
    ] = None,
    state_dtype: Annotated[
        str | None, typer.Option(help="The recurrent state's dtype (--mamba-ssm-cache-dtype).")
    ] = None,
    conv_dtype: Annotated[
        str | None, typer.Option(help="The conv window's dtype (--mamba-cache-dtype).")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="The model's dtype.")] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option("--prefix-caching/--no-prefix-caching", help="On by default on Gaudi only."),
    ] = None,
    pool_gib: Annotated[float | None, _number("--pool-gib", "KV-cache pool of one card.")] = None,
    device_memory_gib: Annotated[
        float | None,
        _number("--device-memory-gib", "Memory of one card; known for the platforms above."),
    ] = None,
    utilisation: Annotated[
        float | None, _number("--utilisation", "--gpu-memory-utilization; 0.92 when not given.")
    ] = None,
    non_kv_gib: Annotated[
        float | None, _number("--non-kv-gib", "Weights, activations and graphs of one card.")
    ] = None,
    max_num_seqs: Annotated[int | None, _whole("--max-num-seqs", "As vLLM's.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, _whole("--max-num-batched-tokens", "As vLLM's.")
    ] = None,
    block_size: Annotated[int | None, _whole("--block-size", "As vLLM's.")] = None,
    mtp_layers: Annotated[
        int | None, _whole("--mtp-layers", "Layers of the MTP head, where the config is silent.")
    ] = None,
    drafter_layers: Annotated[
        int | None, _whole("--drafter-layers", "Instead of the drafter config's.")
    ] = None,
    drafter_kv_heads: Annotated[
        int | None, _whole("--drafter-kv-heads", "Instead of the drafter config's.")
    ] = None,
    drafter_head_dim: Annotated[
        int | None, _whole("--drafter-head-dim", "Instead of the drafter config's.")
    ] = None,
    drafter_sliding_layers: Annotated[
        int | None, _whole("--drafter-sliding-layers", "How many of the drafter's layers slide.")
    ] = None,
    drafter_window: Annotated[
        int | None, _whole("--drafter-window", "Their window in tokens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of the table.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw memory by draft length into this PNG.")
    ] = None,
) -> None:
    """Show the memory, block size, slots and limits of a deployment before it starts.

    Exit code 0: a plan; 1: a plan with an error among its findings; 2: bad input.
    """
    from vllm_gaudi_ext.planner.config import DrafterOverrides
    from vllm_gaudi_ext.planner.errors import PlanError
    from vllm_gaudi_ext.planner.findings import findings
    from vllm_gaudi_ext.planner.plan import make_plan
    from vllm_gaudi_ext.planner.report import (
        check_plot_path,
        print_report,
        to_json,
        write_plot,
    )
    from vllm_gaudi_ext.planner.request import Options, make_deployment

    try:
        if plot is not None:
            check_plot_path(plot)
        options = Options(
            model=model,
            serve=serve,
            drafter=drafter,
            drafts=drafts,
            mtp_layers=mtp_layers,
            overrides=DrafterOverrides(
                layers=drafter_layers,
                kv_heads=drafter_kv_heads,
                head_dim=drafter_head_dim,
                sliding_layers=drafter_sliding_layers,
                window=drafter_window,
            ),
            tokens=tokens,
            tp=tp,
            ep=ep,
            dtype=dtype,
            kv_dtype=kv_dtype,
            conv_dtype=conv_dtype,
            state_dtype=state_dtype,
            platform=platform,
            unit=unit,
            block_size=block_size,
            caching=prefix_caching,
            pool_gib=pool_gib,
            device_memory_gib=device_memory_gib,
            utilisation=utilisation,
            non_kv_gib=non_kv_gib,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        made = make_plan(make_deployment(options), findings)
        if plot is not None:
            write_plot(made, plot)
    except PlanError as error:
        _refuse(str(error))
    if as_json:
        typer.echo(to_json(made))
    else:
        from rich.console import Console

        print_report(made, Console(soft_wrap=False))
    if any(finding.level == "error" for finding in made.findings):
        raise typer.Exit(1)
