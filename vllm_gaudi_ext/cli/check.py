"""`gaudi-ext check URL`: prove that a prefix-cache hit equals a cold run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_gaudi_ext.check.runner import CheckOptions, Run
    from vllm_gaudi_ext.check.verdict import CheckReport


def check(
    url: Annotated[str, typer.Argument(help="The server, such as http://localhost:8000")],
    model: Annotated[
        str | None, typer.Option(help="Model to ask; by default the server's first.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="GAUDI_EXT_API_KEY", help="Key, sent as a bearer token."),
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(help="B; by default learned from cached_tokens.")
    ] = None,
    blocks: Annotated[int, typer.Option(help="Check the boundaries of so many blocks.")] = 3,
    answer_tokens: Annotated[int, typer.Option(help="Tokens that a request generates.")] = 16,
    scenario: Annotated[
        list[str] | None, typer.Option(help="Play only this one; may be repeated.")
    ] = None,
    cuts: Annotated[
        str,
        typer.Option(
            help="Where prefill-against-decode noise is granted to a state that prefill made: "
            "auto (where a hit's prompt may be cut elsewhere), any, or same (nowhere)."
        ),
    ] = "auto",
    concurrency: Annotated[int, typer.Option(help="Requests in flight at most.")] = 4,
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 120.0,
    retries: Annotated[
        int, typer.Option(help="Further attempts after a connection error, 5xx or 429.")
    ] = 3,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Send no longer prompt; by default what the server takes.")
    ] = None,
    max_answer_mib: Annotated[float, typer.Option(help="Longest answer in MiB.")] = 8.0,
    header: Annotated[
        list[str] | None, typer.Option(help="Further header, NAME:VALUE; may be repeated.")
    ] = None,
    ca_file: Annotated[Path | None, typer.Option(help="PEM file of trusted authorities.")] = None,
    client_cert: Annotated[Path | None, typer.Option(help="PEM client certificate.")] = None,
    client_key: Annotated[Path | None, typer.Option(help="PEM key of --client-cert.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Do not verify the server's certificate.")
    ] = False,
    no_proxy: Annotated[
        bool, typer.Option("--no-proxy", help="Ignore proxy settings of the environment.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal prompts.")] = 0,
    json_out: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.")
    ] = False,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.")] = None,
    save_prompts: Annotated[
        Path | None,
        typer.Option(help="Write prompts and answers into this folder (nothing else does)."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Prove that a prefix-cache hit equals a cold run, on a running server.

    Exit code 0: every hit equals its cold run. 1: one differs. 2: it could not be told.
    """
    from pydantic import ValidationError
    from rich.console import Console

    from vllm_gaudi_ext.check.runner import CheckOptions

    try:
        options = CheckOptions(
            model=model,
            api_key=api_key,
            headers=_headers(header or []),
            block_tokens=block_tokens,
            blocks=blocks,
            answer_tokens=answer_tokens,
            scenarios=tuple(scenario or ()),
            cuts=cuts,  # type: ignore[arg-type]
            concurrency=concurrency,
            timeout=timeout,
            retries=retries,
            max_prompt_tokens=max_prompt_tokens,
            max_answer_bytes=_bytes(max_answer_mib),
            ca_file=ca_file,
            client_cert=client_cert,
            client_key=client_key,
            insecure=insecure,
            use_proxies=not no_proxy,
            seed=seed,
        )
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        option = "--" + str(first["loc"][0]).replace("_", "-").replace("scenarios", "scenario")
        reason = first["msg"].removeprefix("Value error, ")
        _fail(f"{option} {first['input']!r}: {reason}")
    except ValueError as e:
        _fail(str(e))
    errors = Console(stderr=True)
    try:
        run = _check_with_progress(url, options, errors, show=not quiet)
    except ValueError as e:
        _fail(str(e))
    except KeyboardInterrupt:
        typer.echo("gaudi-ext check: interrupted", err=True)
        raise typer.Exit(130) from None
    _write_files(run, junit, save_prompts)
    _print(run.report, as_json=json_out)
    raise typer.Exit(run.report.exit_code)


def _check_with_progress(url: str, options: CheckOptions, console: Console, show: bool) -> Run:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    from vllm_gaudi_ext.check.runner import run_check_in_full

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not show or not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, planned: int | None, what: str) -> None:
            bar.update(task, completed=done, total=planned, description=what)

        return run_check_in_full(url, options, progress)


def _write_files(run: Run, junit: Path | None, prompts: Path | None) -> None:
    from vllm_gaudi_ext.check import report

    try:
        if junit is not None:
            junit.write_text(report.to_junit(run.report), encoding="utf-8")
        if prompts is not None:
            report.save_prompts(run.observations, prompts)
    except OSError as e:
        _fail(f"cannot write {e.filename}: {e.strerror}")


def _print(result: CheckReport, *, as_json: bool) -> None:
    from rich.console import Console

    from vllm_gaudi_ext.check import report

    if as_json:
        typer.echo(report.to_json(result))
    elif len(result.cases) == 1 and result.cases[0].verdict.value == "failed":
        # Nothing was checked, so a table would only hide the one line that matters.
        _fail(result.cases[0].detail)
    else:
        console = Console()
        # A log or a pipe has no width of its own, and 80 columns would break every sentence.
        report.print_report(result, console if console.is_terminal else Console(width=150))


def _headers(lines: list[str]) -> tuple[tuple[str, str], ...]:
    pairs = [line.partition(":") for line in lines]
    for name, colon, _ in pairs:
        if not colon or not name.strip():
            # Not echoed: it may hold a secret.
            raise ValueError("--header: it must look like NAME:VALUE")
    return tuple((name.strip(), value.strip()) for name, _, value in pairs)


def _bytes(mib: Any) -> int:
    if not 0 < mib <= 4096:
        raise ValueError(f"--max-answer-mib {mib!r}: it must be above 0 and at most 4096")
    return max(1024, int(mib * (1 << 20)))


def _fail(message: str) -> NoReturn:
    typer.echo(f"gaudi-ext check: {message}", err=True)
    raise typer.Exit(2)
