"""Whether ReplaySSM is to be active, and every reason why it can't be; on plain facts.

`auto` makes it active for a GDN hybrid with speculative decoding. Once it is to be active nothing
falls back to vLLM's own path: a deployment that can't have it does not start, and the operator sees
all reasons together, each with what was found and the flag that changes it.
"""

from __future__ import annotations

from cuda_ext import ring
from cuda_ext.facts import ARCHITECTURES, ReplayFacts
from vllm_gaudi_ext import versions
from vllm_gaudi_ext.config import example

MAX_DRAFTS = 31
STATE_DTYPES = ("float32", "bfloat16")

# Device types with kernels of their own for a ReplaySSM step, by the name that vLLM gives them.
# The plain torch reference runs wherever torch does.
NATIVE_BACKENDS = {"cpu": "reference"}


def wants_replay(facts: ReplayFacts) -> bool:
    """Whether ReplaySSM is to be active: asked for, or `auto` where it has something to save.

    `on` makes it active without drafts too: nothing is saved then, but every token is decoded by
    the layer that serves drafts, so the two can be compared.
    """
    if not facts.gdn_hybrid:
        return False
    return facts.options.replay == "on" or (facts.options.replay == "auto" and facts.drafts > 0)


def replay_problems(facts: ReplayFacts) -> list[str]:
    """Every reason not to start, in words; empty where nothing is wrong or nothing was asked for.

    Args:
        facts: the deployment.
    """
    if facts.options.replay == "off":
        return []
    if not wants_replay(facts):
        return [_no_layers(facts)] if facts.options.replay == "on" else []
    problems = [
        versions.replay_version_problem(facts.vllm),
        _native(facts),
        _device(facts),
        _drafts(facts),
        _caching(facts),
        _connector(facts),
        *_parallel(facts),
        *_page(facts),
    ]
    return [problem for problem in problems if problem]


def refusal(problems: list[str]) -> str:
    """One text of all problems."""
    return (
        "gaudi_ext refuses to start with ReplaySSM: "
        + "; ".join(f"({number}) {problem}" for number, problem in enumerate(problems, 1))
        + f". To serve without ReplaySSM, as stock vLLM does: {example(replay='off')}"
    )


def _no_layers(facts: ReplayFacts) -> str:
    return (
        f"replay is 'on' but {facts.architecture} has no GDN layers that it could serve "
        f"(served: {', '.join(ARCHITECTURES)}): set replay to 'auto'"
    )


def _native(facts: ReplayFacts) -> str | None:
    if facts.native_replay:
        return (
            f"vllm {facts.vllm} serves {facts.architecture} with a replay of its own: set replay "
            "to 'off' and use vLLM's --use-replayssm"
        )
    if facts.native_flag:
        return (
            "--use-replayssm is set, which is vLLM's own replay for other layers than GDN: leave "
            "it out"
        )
    return None


def _device(facts: ReplayFacts) -> str | None:
    if facts.options.backend == "reference":
        if facts.device not in ("cpu", "cuda"):
            return f"device type {facts.device!r} was never tested with the reference backend"
        if facts.device != "cpu" and not facts.eager:
            return (
                "the reference backend can't be captured in graphs: add --enforce-eager, or set "
                "backend to 'auto'"
            )
        return None
    if facts.device in NATIVE_BACKENDS:
        return None
    return (
        f"there are no ReplaySSM kernels for device type {facts.device!r} in this version: set "
        "replay to 'off', or for a slow but exact run set backend to 'reference' with "
        "--enforce-eager"
    )


def _drafts(facts: ReplayFacts) -> str | None:
    if facts.drafts > MAX_DRAFTS:
        return (
            f"{facts.drafts} draft tokens are more than the {MAX_DRAFTS} that were tested: lower "
            "num_speculative_tokens in --speculative-config"
        )
    if facts.drafter_has_states:
        return (
            f"the draft model of method {facts.method!r} has recurrent states of its own, and "
            "drafting token by token can't be taken back in a ring: use a drafter without "
            "recurrent layers (DFlash, MTP, ngram, suffix)"
        )
    return None


def _caching(facts: ReplayFacts) -> str | None:
    if facts.prefix_caching:
        return (
            "prefix caching is asked for, and a ReplaySSM state is not saved at block boundaries "
            "yet: use --no-enable-prefix-caching"
        )
    return None


def _connector(facts: ReplayFacts) -> str | None:
    if facts.kv_connector is not None:
        return (
            f"KV connector {facts.kv_connector!r} would move a state without its ring: leave out "
            "--kv-transfer-config"
        )
    return None


def _parallel(facts: ReplayFacts) -> list[str]:
    sizes = (
        (facts.pp, "pipeline parallel", "--pipeline-parallel-size 1"),
        (facts.dcp, "decode context parallel", "--decode-context-parallel-size 1"),
        (facts.pcp, "prefill context parallel", "--prefill-context-parallel-size 1"),
    )
    problems = [
        f"{name} size is {size}, only 1 is supported: use {flag}"
        for size, name, flag in sizes
        if size > 1
    ]
    if facts.dual_batch_overlap:
        problems.append(
            "a step is split into micro-batches, which GDN layers don't support: leave out "
            "--enable-dbo and --ubatch-size"
        )
    return problems


def _page(facts: ReplayFacts) -> list[str]:
    problems = []
    if facts.state_dtype not in STATE_DTYPES:
        problems.append(
            f"state dtype {facts.state_dtype!r} is not one of {', '.join(STATE_DTYPES)}: use "
            "--mamba-ssm-cache-dtype float32"
        )
    if facts.conv_dtype != facts.dtype:
        problems.append(
            f"conv window dtype {facts.conv_dtype!r} differs from the model's {facts.dtype!r}: "
            "rows of one step would be convolved with other values than rows of two; use "
            "--mamba-cache-dtype auto"
        )
    if not problems and facts.drafts <= MAX_DRAFTS and facts.heads is not None:
        try:
            replay_layout(facts)
        except ValueError as error:
            problems.append(str(error))
    return problems


def replay_layout(facts: ReplayFacts, *, conv_dim_first: bool = False) -> ring.PageLayout:
    """The page of one GDN layer on one rank.

    Args:
        facts: of a GDN hybrid.
        conv_dim_first: vLLM's DS order of the conv window.

    Raises:
        ValueError: head counts, dtypes or alignments don't fit.
    """
    assert facts.heads is not None, facts.architecture
    return ring.replay_layout(
        facts.heads.shard(facts.tp),
        facts.drafts,
        conv_dtype=facts.conv_dtype,
        ssm_dtype=facts.state_dtype,
        input_dtype=facts.dtype,
        conv_dim_first=conv_dim_first,
    )
