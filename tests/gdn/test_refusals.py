"""Every precondition alone, several at once, and none forgotten."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from vllm_gaudi_ext.config import ExtOptions
from vllm_gaudi_ext.gdn.refusals import (
    CACHING_OFF,
    LayoutFacts,
    Problem,
    ServingFacts,
    config_problems,
    layout_problems,
    option_problems,
    refuse,
    refuse_options,
    smallest_budget,
)

SOUND_CONFIG = ServingFacts(
    contiguous_pa=False,
    compact_gdn=True,
    speculative=None,
    defragmenter=False,
    prefix_match_unit=None,
    mamba_opt_ins=(),
    kv_connector=None,
    kv_offload=None,
    pipeline_parallel=1,
    context_parallel=1,
    pooling=False,
    max_num_batched_tokens=2048,
    max_num_seqs=256,
    long_prefill_token_threshold=0,
    block_tokens=896,
    mamba_cache_mode="align",
)
SOUND_LAYOUT = LayoutFacts(
    group_block_tokens=(896, 896, 896, 896),
    attention_groups=1,
    foreign_groups=(),
    kernel_block_tokens=128,
    pairing=None,
    state_bytes=3_207_168,
    page_bytes=3_670_016,
    row_remainder_bytes=0,
    padding_block=700,
    pool_kernel_blocks=700,
    shared_layers=(),
    speculative_blocks=0,
)


@dataclass(frozen=True)
class Case:
    """A change of sound facts that is one problem, and what its text must say.

    Args:
        change: the fields that differ from the sound facts.
        found: fragments that say what was found.
        fixes: fragments that name the flags.
        of: the field that this case is for; the first changed one unless given.
    """

    change: dict[str, Any]
    found: tuple[str, ...]
    fixes: tuple[str, ...]
    of: str = ""

    @property
    def field(self) -> str:
        return self.of or next(iter(self.change))

    def __str__(self) -> str:
        return ",".join(f"{name}={value!r}" for name, value in self.change.items())


# In the order in which config_problems lists them.
CONFIG_CASES = [
    Case(
        {"contiguous_pa": True},
        ("VLLM_CONTIGUOUS_PA is on",),
        ("VLLM_CONTIGUOUS_PA=false", CACHING_OFF),
    ),
    Case({"compact_gdn": False}, ("compact GDN is off",), ("VLLM_COMPACT_GDN=1",)),
    Case(
        {"speculative": "qwen3_next_mtp"},
        ("'qwen3_next_mtp'",),
        ("--speculative-config", CACHING_OFF),
    ),
    Case({"defragmenter": True}, ("defragmenter is on",), ("VLLM_DEFRAG", "VLLM_CONTIGUOUS_PA")),
    Case({"prefix_match_unit": 128}, ("128 tokens",), ("--prefix-match-unit",)),
    Case(
        {"mamba_opt_ins": ("enable_mamba_fine_grained_prefix_cache",)},
        ("enable_mamba_fine_grained_prefix_cache is on",),
        ("switch enable_mamba_fine_grained_prefix_cache off",),
    ),
    Case(
        {"kv_connector": "NixlConnector"},
        ("'NixlConnector'",),
        ("--kv-transfer-config", CACHING_OFF),
    ),
    Case({"kv_offload": "native"}, ("'native'",), ("--kv-offloading-size", CACHING_OFF)),
    Case({"pipeline_parallel": 2}, ("is 2",), ("--pipeline-parallel-size 1",)),
    Case(
        {"context_parallel": 4},
        ("is 4",),
        ("--decode-context-parallel-size", "--prefill-context-parallel-size"),
    ),
    Case({"pooling": True}, ("pooling model",), (CACHING_OFF,)),
    Case({"foreign_worker": "other.Worker"}, ("'other.Worker'",), ("--worker-cls",)),
    Case({"foreign_scheduler": "other.Sched"}, ("'other.Sched'",), ("--scheduler-cls",)),
    Case({"mamba_cache_mode": "all"}, ("'all'", "'align'"), ("--mamba-cache-mode",)),
    Case(
        {"max_num_batched_tokens": 896},
        ("896 tokens", "640", "256 sequences", "B=896"),
        ("--max-num-batched-tokens 1152 ", "--max-num-seqs"),
    ),
    Case(
        {"long_prefill_token_threshold": 895},
        ("895 tokens", "B=896"),
        ("--long-prefill-token-threshold 0", "at least 896"),
    ),
]
MORE_CONFIG_CASES = [
    Case({"mamba_cache_mode": "none"}, ("'none'",), ("--mamba-cache-mode",)),
    Case(
        {"max_num_seqs": 1153},
        ("2048 tokens", "leaves 895", "1153 sequences", "B=896"),
        ("--max-num-batched-tokens 2176 ", "--max-num-seqs"),
    ),
    Case(
        {"block_tokens": 2176},
        ("2048 tokens", "leaves 1792", "B=2176"),
        ("--max-num-batched-tokens 2432 ",),
    ),
    Case(
        {"budget_unit": 1000, "max_num_batched_tokens": 896},
        ("896 tokens", "leaves 640"),
        ("--max-num-batched-tokens 2000 ", "multiple of 1000"),
    ),
    Case(
        {"disable_chunked_mm_input": True},
        ("chunked multimodal input",),
        ("--disable-chunked-mm-input",),
    ),
    Case({"long_prefill_token_threshold": 1}, ("1 tokens",), ("--long-prefill-token-threshold",)),
]
LAYOUT_CASES = [
    Case(
        {"group_block_tokens": (896, 896, 128, 896)},
        ("[128, 896]",),
        ("--block-size", "--mamba-block-size"),
    ),
    Case({"attention_groups": 2}, ("2 attention groups",), (CACHING_OFF,)),
    Case(
        {"foreign_groups": ("SlidingWindowSpec", "MambaSpec (MAMBA2)")},
        ("SlidingWindowSpec", "MambaSpec (MAMBA2)"),
        (CACHING_OFF,),
    ),
    Case({"pairing": "2 GDN layers have no page"}, ("2 GDN layers have no page",), (CACHING_OFF,)),
    Case({"state_bytes": 3_670_020}, ("3670020 bytes", "has 3670016"), ("--block-size",)),
    Case({"row_remainder_bytes": 2}, ("2 bytes",), (CACHING_OFF,)),
    Case(
        {"kernel_block_tokens": 768}, ("[896]", "768"), ("--block-size",), of="kernel_block_tokens"
    ),
    Case({"padding_block": 699}, ("kernel block 699", "pool of 700"), (CACHING_OFF,)),
    Case(
        {"shared_layers": ("layers.7.attn", "layers.9.attn")},
        ("layers.7.attn, layers.9.attn",),
        (CACHING_OFF,),
    ),
    Case({"speculative_blocks": 3}, ("3 extra state blocks",), ("--speculative-config",)),
]
MORE_LAYOUT_CASES = [
    Case({"attention_groups": 0}, ("0 attention groups",), (CACHING_OFF,)),
    Case({"group_block_tokens": ()}, ("[]",), ("--block-size",)),
    Case({"page_bytes": 3_207_164}, ("3207168 bytes", "has 3207164"), ("--block-size",)),
    Case({"pool_kernel_blocks": 701}, ("kernel block 700", "pool of 701"), (CACHING_OFF,)),
]


def check_text(problem: Problem, case: Case) -> None:
    for fragment in case.found:
        assert fragment in problem.what
    for fragment in case.fixes:
        assert fragment in problem.fix
    assert str(problem) == f"{problem.what} -> {problem.fix}"


def test_sound_facts_are_no_problem() -> None:
    assert config_problems(SOUND_CONFIG) == []
    assert layout_problems(SOUND_LAYOUT) == []
    refuse([])


@pytest.mark.parametrize("case", CONFIG_CASES + MORE_CONFIG_CASES, ids=str)
def test_each_config_problem_alone(case: Case) -> None:
    (problem,) = config_problems(replace(SOUND_CONFIG, **case.change))
    check_text(problem, case)


@pytest.mark.parametrize("case", LAYOUT_CASES + MORE_LAYOUT_CASES, ids=str)
def test_each_layout_problem_alone(case: Case) -> None:
    (problem,) = layout_problems(replace(SOUND_LAYOUT, **case.change))
    check_text(problem, case)


@pytest.mark.parametrize(
    ("facts", "cases"),
    [
        pytest.param(ServingFacts, CONFIG_CASES + MORE_CONFIG_CASES, id="ServingFacts"),
        pytest.param(LayoutFacts, LAYOUT_CASES + MORE_LAYOUT_CASES, id="LayoutFacts"),
    ],
)
def test_every_field_has_a_case(facts: type, cases: list[Case]) -> None:
    assert {case.field for case in cases} == {field.name for field in fields(facts)}


# Values at or next to the edge of a problem, which are none.
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"max_num_batched_tokens": 896 + 256}, id="budget of B + max_num_seqs"),
        pytest.param({"long_prefill_token_threshold": 896}, id="threshold of B"),
        pytest.param({"prefix_match_unit": 896}, id="match unit of B"),
        pytest.param({"prefix_match_unit": 128, "block_tokens": None}, id="match unit, B unknown"),
        pytest.param({"block_tokens": None, "max_num_batched_tokens": 1}, id="budget, B unknown"),
        pytest.param({"mamba_cache_mode": None}, id="cache mode not known yet"),
    ],
)
def test_config_edges_that_are_sound(change: dict[str, Any]) -> None:
    assert config_problems(replace(SOUND_CONFIG, **change)) == []


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"state_bytes": 3_670_016}, id="a state as large as its page"),
        pytest.param({"padding_block": 701}, id="padding further behind the pool"),
        pytest.param({"kernel_block_tokens": 896}, id="one kernel block a block"),
        pytest.param({"state_bytes": None, "page_bytes": None}, id="sizes unknown"),
    ],
)
def test_layout_edges_that_are_sound(change: dict[str, Any]) -> None:
    assert layout_problems(replace(SOUND_LAYOUT, **change)) == []


@pytest.mark.parametrize("unit", [1, 128])
@pytest.mark.parametrize("block_tokens", [512, 896, 2176])
@pytest.mark.parametrize("seqs", [1, 7, 256])
def test_the_named_budget_is_the_smallest_multiple_that_is_accepted(
    seqs: int, block_tokens: int, unit: int
) -> None:
    short = replace(
        SOUND_CONFIG,
        max_num_batched_tokens=block_tokens,
        max_num_seqs=seqs,
        block_tokens=block_tokens,
        budget_unit=unit,
    )
    (problem,) = config_problems(short)
    named = int(problem.fix.split()[1])
    assert named == smallest_budget(short, block_tokens)
    assert named % unit == 0
    assert config_problems(replace(short, max_num_batched_tokens=named)) == []
    assert config_problems(replace(short, max_num_batched_tokens=named - unit)) != []


def test_several_opt_ins_are_one_problem_each() -> None:
    problems = config_problems(replace(SOUND_CONFIG, mamba_opt_ins=("one", "two")))
    assert [problem.fix for problem in problems] == ["switch one off", "switch two off"]


def together(sound: Any, cases: list[Case]) -> Any:
    return replace(sound, **{name: value for case in cases for name, value in case.change.items()})


def test_all_problems_at_once_are_one_error_in_order() -> None:
    problems = config_problems(together(SOUND_CONFIG, CONFIG_CASES))
    problems += layout_problems(together(SOUND_LAYOUT, LAYOUT_CASES))
    cases = CONFIG_CASES + LAYOUT_CASES
    with pytest.raises(RuntimeError) as error:
        refuse(problems)
    first, *lines = str(error.value).splitlines()
    assert f"({len(cases)} problems)" in first
    assert len(lines) == len(cases)
    for number, (line, problem) in enumerate(zip(lines, problems, strict=True), 1):
        assert line == f"  {number}. {problem}"
    for line, case in zip(lines, cases, strict=True):
        # Block sizes and budgets differ when other problems change them too; the flag does not.
        assert case.fixes[0].split()[0] in line


def test_one_problem_is_called_one() -> None:
    with pytest.raises(RuntimeError, match=r"\(1 problem\):\n  1\. found it -> mend it$"):
        refuse([Problem("found it", "mend it")])


@pytest.mark.parametrize(("replay", "count"), [("auto", 0), ("off", 0), ("on", 1)])
def test_replay_is_no_option_on_gaudi(replay: str, count: int) -> None:
    found = option_problems(ExtOptions(replay=replay))
    assert len(found) == count
    if found:
        assert "not served on Gaudi" in found[0].what
        with pytest.raises(RuntimeError, match="as --additional-config asks"):
            refuse_options(found)


@pytest.mark.parametrize("seed", range(20))
def test_any_choice_of_problems_is_found_whole(seed: int) -> None:
    generator = random.Random(seed)
    config = [case for case in CONFIG_CASES if generator.random() < 0.5]
    layout = [case for case in LAYOUT_CASES if generator.random() < 0.5]
    assert [
        problem
        for case in config
        for problem in config_problems(replace(SOUND_CONFIG, **case.change))
    ] == config_problems(together(SOUND_CONFIG, config))
    found = layout_problems(together(SOUND_LAYOUT, layout))
    assert len(found) == len(layout)
