"""Whether ReplaySSM is to be active, and every reason why it can't be; on plain facts.

`auto` makes it active for a GDN hybrid with speculative decoding. Once it is to be active nothing
falls back to vLLM's own path: a deployment that can't have it does not start, and the operator sees
all reasons together, each with what was found and the flag that changes it.
"""

from __future__ import annotations

from cuda_ext import ring
from cuda_ext.facts import ARCHITECTURES, ReplayFacts
from vllm_gaudi_ext import problems, versions
from vllm_gaudi_ext.config import example
from vllm_gaudi_ext.problems import Problem

MAX_DRAFTS = 31
STATE_DTYPES = ("float32", "bfloat16")
MIN_CAPABILITY = (8, 0)
"""Products of three TF32 or bfloat16 pieces need it."""
REFERENCE_DEVICES = ("cpu", "cuda")
DP_GRAPHS_FROM = "0.31.0"
"""The first vLLM that was read whose dummy steps point at the null page (`get_dummy_block_tables`).

Older ones start under the override of versions alone, which is no leave for wrong tokens."""

# What computes a ReplaySSM step on a device type unless told otherwise: the kernels of
# cuda_ext/ops, or the plain torch reference, which runs wherever torch does.
NATIVE_BACKENDS = {"cpu": "reference", "cuda": "kernels"}


def asks_for_replay(replay: str, architecture: str, *, drafts: bool) -> bool:
    """Whether ReplaySSM is to be active: asked for, or `auto` where it has something to save.

    `on` makes it active without drafts too: nothing is saved then, but every token is decoded by
    the layer that serves drafts, so the two can be compared.
    """
    if architecture not in ARCHITECTURES:
        return False
    return replay == "on" or (replay == "auto" and drafts)


def wants_replay(facts: ReplayFacts) -> bool:
    """`asks_for_replay` of a deployment."""
    return asks_for_replay(facts.options.replay, facts.architecture, drafts=facts.drafts > 0)


def backend_of(facts: ReplayFacts) -> str | None:
    """What computes a step: the backend asked for, or the device's own; None where it has none."""
    if facts.options.backend != "auto":
        return facts.options.backend
    return NATIVE_BACKENDS.get(facts.device)


def replay_problems(facts: ReplayFacts) -> list[Problem]:
    """Every reason not to start; empty where nothing is wrong or nothing was asked for.

    Args:
        facts: the deployment.
    """
    if facts.options.replay == "off":
        return []
    if not wants_replay(facts):
        return [_no_layers(facts)] if facts.options.replay == "on" else []
    found = [
        _version(facts),
        _native(facts),
        _device(facts),
        _decode_kernel(facts),
        *_drafts(facts),
        _caching(facts),
        _connector(facts),
        *_parallel(facts),
        *_page(facts),
    ]
    return [problem for problem in found if problem is not None]


def refuse(found: list[Problem]) -> None:
    """Return where there is no problem.

    Raises:
        RuntimeError: lists every problem with its fix, and how to serve without ReplaySSM.
    """
    without = f"To serve without it, as stock vLLM does: {example(replay='off')}"
    problems.refuse("serve with ReplaySSM", found, without)


def not_named() -> Problem:
    """ReplaySSM is asked for where vLLM does not load this package."""
    return Problem(
        "replay is 'on', and VLLM_PLUGINS does not name gaudi_ext, so stock vLLM would serve",
        "start with VLLM_PLUGINS=gaudi_ext",
    )


def _no_layers(facts: ReplayFacts) -> Problem:
    return Problem(
        f"replay is 'on' but {facts.architecture} has no GDN layers that it could serve "
        f"(served: {', '.join(ARCHITECTURES)})",
        "set replay to 'auto'",
    )


def _version(facts: ReplayFacts) -> Problem | None:
    return None if facts.vllm is None else versions.replay_version_problem(facts.vllm)


def _native(facts: ReplayFacts) -> Problem | None:
    # The flag is refused by vLLM itself before an engine gets here; preflight asks for it.
    if facts.native_replay:
        return Problem(
            f"vllm {facts.vllm} serves {facts.architecture} with a replay of its own",
            "set replay to 'off' and use vLLM's --use-replayssm",
        )
    if facts.native_flag:
        return Problem(
            "--use-replayssm is set, which is vLLM's own replay for other layers than GDN",
            "remove --use-replayssm",
        )
    return None


def _device(facts: ReplayFacts) -> Problem | None:
    if facts.options.backend == "reference":
        if facts.device not in REFERENCE_DEVICES:
            return Problem(
                f"the reference backend is not served on device type {facts.device!r} (served: "
                f"{', '.join(REFERENCE_DEVICES)})",
                "set replay to 'off'",
            )
        if facts.device != "cpu" and not facts.eager:
            return Problem(
                "the reference backend can't be captured in graphs",
                "add --enforce-eager, or set backend to 'auto'",
            )
        return None
    if backend_of(facts) is None:
        return Problem(
            f"there are no ReplaySSM kernels for device type {facts.device!r} in this version",
            "set replay to 'off'",
        )
    if facts.capability is not None and facts.capability < MIN_CAPABILITY:
        found, least = (".".join(map(str, pair)) for pair in (facts.capability, MIN_CAPABILITY))
        return Problem(
            f"the GPU's compute capability is {found}, and the ReplaySSM kernels need {least}",
            "set replay to 'off', or for a slow but exact run backend to 'reference' with "
            "--enforce-eager",
        )
    return None


def _decode_kernel(facts: ReplayFacts) -> Problem | None:
    if facts.fused_decode_kernel:
        return Problem(
            "VLLM_GDN_DECODE_KERNEL asks for a kernel that writes a state for each row",
            "unset VLLM_GDN_DECODE_KERNEL",
        )
    return None


def _drafts(facts: ReplayFacts) -> list[Problem]:
    found = []
    if facts.drafts > MAX_DRAFTS:
        found.append(
            Problem(
                f"{facts.drafts} draft tokens are more than the {MAX_DRAFTS} that were tested",
                "lower num_speculative_tokens in --speculative-config",
            )
        )
    if facts.drafter_has_states:
        found.append(
            Problem(
                f"the draft model of method {facts.method!r} has recurrent states of its own, and "
                "drafting token by token can't be taken back in a ring",
                "use a drafter without recurrent layers (DFlash, MTP, ngram, suffix)",
            )
        )
    return found


def _caching(facts: ReplayFacts) -> Problem | None:
    if facts.prefix_caching:
        return Problem(
            "prefix caching is asked for, and a ReplaySSM state is not saved at block boundaries "
            "yet",
            "use --no-enable-prefix-caching",
        )
    return None


def _connector(facts: ReplayFacts) -> Problem | None:
    if facts.kv_connector is not None:
        return Problem(
            f"KV transfer is on (connector {facts.kv_connector!r}): it would move a state without "
            "its ring",
            "remove --kv-transfer-config and --kv-offloading-size, which sets one too",
        )
    return None


def _parallel(facts: ReplayFacts) -> list[Problem]:
    sizes = (
        (facts.pp, "pipeline parallelism", "--pipeline-parallel-size"),
        (facts.dcp, "decode context parallelism", "--decode-context-parallel-size"),
        (facts.pcp, "prefill context parallelism", "--prefill-context-parallel-size"),
    )
    found = [
        Problem(f"{name} is {size}, and only 1 is supported", f"remove {flag}")
        for size, name, flag in sizes
        if size > 1
    ]
    if facts.dp > 1 and not facts.eager and facts.vllm is not None:
        found += _data_parallel(facts.dp, facts.vllm)
    if facts.dual_batch_overlap:
        found.append(
            Problem(
                "a step is split into micro-batches, which GDN layers don't support",
                "remove --enable-dbo and --ubatch-size",
            )
        )
    return found


def _data_parallel(dp: int, vllm: str) -> list[Problem]:
    if not versions.is_before(vllm, DP_GRAPHS_FROM):
        return []
    return [
        Problem(
            f"data parallelism is {dp} on vllm {vllm}, whose idle ranks plan their dummy steps "
            "over the rows of live requests when full graphs are on",
            f"add --enforce-eager, remove --data-parallel-size, or use vllm {DP_GRAPHS_FROM}",
        )
    ]


def _page(facts: ReplayFacts) -> list[Problem]:
    found = []
    if facts.state_dtype not in STATE_DTYPES:
        found.append(
            Problem(
                f"the state's dtype is {facts.state_dtype!r}, not one of {', '.join(STATE_DTYPES)}",
                "use --mamba-ssm-cache-dtype float32",
            )
        )
    if facts.conv_dtype != facts.dtype:
        found.append(
            Problem(
                f"the conv window's dtype is {facts.conv_dtype!r}, the model's {facts.dtype!r}: "
                "rows of one step would be convolved with other values than rows of two",
                "use --mamba-cache-dtype auto",
            )
        )
    if not found and facts.drafts <= MAX_DRAFTS and facts.heads is not None:
        try:
            replay_layout(facts)
        except ValueError as error:
            found.append(Problem(str(error), "change --tensor-parallel-size"))
    return found


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
