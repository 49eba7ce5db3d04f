"""What can't be served with prefix caching is refused at start-up; without caching nothing changes.

Refusals come in three places of the real start: when the configuration is made, when the layers'
cache specs are known (and with them B), and when the KV cache is built. Each place raises one
RuntimeError with all of its problems.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import driving
import harness
import pytest
import stock

B = 384
STOCK_SCHEDULER = "vllm_gaudi.v1.core.sched.hpu_async_scheduler.HPUAsyncScheduler"
STOCK_WORKER = "vllm_gaudi.v1.worker.hpu_worker.HPUWorker"


@dataclass(frozen=True)
class Case:
    """Options and variables that must be refused, and what the refusal says: value and remedy."""

    name: str
    says: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


CONFIG_CASES = [
    Case(
        "compact GDN off",
        ("compact GDN is off", "VLLM_COMPACT_GDN=1"),
        env={"VLLM_COMPACT_GDN": "0"},
    ),
    Case(
        "contiguous PA",
        ("VLLM_CONTIGUOUS_PA is on", "turns prefix caching off", "VLLM_CONTIGUOUS_PA=false"),
        env={"VLLM_CONTIGUOUS_PA": "true"},
    ),
    Case(
        "defragmenter",
        ("KV defragmenter is on", "VLLM_DEFRAG"),
        env={"VLLM_DEFRAG": "true"},
    ),
    Case(
        "speculative decoding",
        ("method 'ngram'", "--speculative-config"),
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 3,
            }
        },
    ),
    Case(
        "KV connector",
        ("connector 'ExampleConnector'", "--kv-transfer-config"),
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
    ),
    Case(
        "KV offload",
        ("backend 'native'", "--kv-offloading-size"),
        {"kv_offloading_size": 1.0},
    ),
    Case(
        "pipeline parallel",
        ("pipeline parallelism is 2", "--pipeline-parallel-size 1"),
        {"pipeline_parallel_size": 2},
    ),
    Case(
        "decode context parallel",
        ("context parallelism is 2", "--decode-context-parallel-size"),
        {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
    ),
    Case(
        "prefill context parallel",
        ("context parallelism is 2", "--prefill-context-parallel-size"),
        {"prefill_context_parallel_size": 2},
    ),
    Case(
        "pooling model",
        ("a pooling model", "--no-enable-prefix-caching"),
        {"runner": "pooling"},
    ),
    Case(
        "foreign worker",
        (f"worker class is '{STOCK_WORKER}'", "--worker-cls"),
        {"worker_cls": STOCK_WORKER},
    ),
    Case(
        "foreign scheduler",
        (f"scheduler class is '{STOCK_SCHEDULER}'", "--scheduler-cls"),
        {"scheduler_cls": STOCK_SCHEDULER},
    ),
]

SPEC_CASES = [
    Case(
        "partial-block hits",
        ("prefix_match_unit is 128 tokens", "--prefix-match-unit"),
        {"prefix_match_unit": 128},
    ),
    Case(
        "C18, B larger than the budget",
        ("budget of 256 tokens", f"B={B}", "--max-num-batched-tokens 512"),
        {"max_num_batched_tokens": 256},
    ),
    Case(
        "budget of exactly B",
        ("budget of 384 tokens leaves 380", "4 sequences", "--max-num-batched-tokens 512"),
        {"max_num_batched_tokens": B},
    ),
    Case(
        "long prefills cut below B",
        ("long_prefill_token_threshold is 128", f"B={B}", "--long-prefill-token-threshold 0"),
        {"long_prefill_token_threshold": 128},
    ),
]


def refusal_of(start: Callable[[], object], problems: int | None) -> str:
    """The text of the one RuntimeError that `start` must end in.

    Args:
        problems: how many it must list; None for any number.
    """
    with pytest.raises(RuntimeError, match="cannot serve with prefix caching") as raised:
        start()
    text = str(raised.value)
    listed = len(re.findall(r"^  \d+\. .+ -> .+$", text, flags=re.M))
    assert listed == (problems or listed), text
    assert f"({listed} problem{'s' if listed > 1 else ''})" in text
    return text


def together(cases: list[Case]) -> tuple[dict[str, Any], dict[str, str]]:
    options: dict[str, Any] = {}
    env: dict[str, str] = {}
    for case in cases:
        options |= case.options
        env |= case.env
    return options, env


@pytest.mark.parametrize("case", CONFIG_CASES + SPEC_CASES, ids=lambda case: case.name)
def test_engine_refuses_to_start(engines: Any, case: Case) -> None:
    text = refusal_of(lambda: engines(env=case.env, **case.options), 1)
    for words in case.says:
        assert words in text


@pytest.mark.parametrize("cases", [CONFIG_CASES, SPEC_CASES], ids=["config", "specs"])
def test_engine_names_all_problems_at_once(engines: Any, cases: list[Case]) -> None:
    # Of two cases that set one option, or that are one problem, the later is left out.
    left_out = {"prefill context parallel", "budget of exactly B"}
    cases = [case for case in cases if case.name not in left_out]
    options, env = together(cases)
    text = refusal_of(lambda: engines(env=env, **options), len(cases))
    for case in cases:
        for words in case.says:
            assert words in text


def test_smallest_legal_budget_of_the_refusal_starts_and_starves_nobody(engines: Any) -> None:
    """Case C20: a budget below a block is refused; the one that is named serves several at once."""
    text = refusal_of(lambda: engines(max_num_batched_tokens=B), 1)
    (named,) = re.findall(r"--max-num-batched-tokens (\d+) or more", text)
    engine = engines(max_num_batched_tokens=int(named))
    run = driving.Requests(engine)
    for i in range(3):
        run.add(f"decode{i}", harness.prompt(i, 30), 12)
    while any(driving.find(engine, f"decode{i}").num_output_tokens < 2 for i in range(3)):
        run.step()
    run.add("prefill", harness.prompt(9, 3 * B + 20), 4)
    with driving.watched(engine) as seen:
        run.drain()
    assert len(run.finished) == 4
    (chunks,) = [c for r, c in seen.chunks().items() if r.startswith("prefill")]
    # A block in every step while the others decode: nothing of the budget's last block is lost.
    assert chunks[:4] == [(0, B), (B, B), (2 * B, B), (3 * B, 20)]


def model_of(*kinds: str) -> Any:
    """The dense tiny model with these layers, "l" for GDN and "f" for full attention."""
    import tiny_models

    names = {"l": "linear_attention", "f": "full_attention"}
    layers = [names[kind] for kind in "".join(kinds)]
    text = dict(tiny_models.DENSE.text)
    text |= {"layer_types": layers, "num_hidden_layers": len(layers)}
    return replace(tiny_models.DENSE, name=f"tiny-{''.join(kinds)}", text=text)


@pytest.mark.parametrize("layers", ["lllf" * 2, "lf" * 2], ids=["three groups", "one group"])
def test_states_by_block_are_refused(engines: Any, layers: str) -> None:
    """Without vllm-gaudi's hybrid cache states lie in blocks, whatever VLLM_COMPACT_GDN says."""
    env = {"VLLM_USE_HYBRID_CACHE": "0"}
    text = refusal_of(
        lambda: engines(model_of(layers), env=env, max_num_batched_tokens=512), problems=None
    )
    assert "VLLM_USE_HYBRID_CACHE" in text


def test_model_with_more_attention_than_gdn_layers_is_refused(engines: Any) -> None:
    """vLLM then makes several attention groups, and a state's block is no page of one layer."""
    text = refusal_of(lambda: engines(model_of("flff"), max_num_batched_tokens=512), 1)
    assert "3 attention groups" in text
    assert "--no-enable-prefix-caching" in text


# The KV cache: the running engine is given a configuration that vLLM would not make for it.


def gdn_groups(config: Any) -> list[Any]:
    return [g for g in config.kv_cache_groups if type(g.kv_cache_spec).__name__ == "MambaSpec"]


def attention_group(config: Any) -> Any:
    (group,) = [
        g for g in config.kv_cache_groups if type(g.kv_cache_spec).__name__ == "FullAttentionSpec"
    ]
    return group


def change(groups: list[Any], **values: Any) -> None:
    for group in groups:
        group.kv_cache_spec = replace(group.kv_cache_spec, **values)


def remove_layer(config: Any, name: str) -> None:
    """Takes an attention layer out of the KV cache, and its group when that was the last one."""
    group = attention_group(config)
    group.layer_names.remove(name)
    for tensor in config.kv_cache_tensors:
        if name in tensor.shared_by:
            tensor.shared_by.remove(name)
    if not group.layer_names:
        config.kv_cache_groups.remove(group)


def other_block_size(config: Any, runner: Any) -> None:
    change(gdn_groups(config), block_size=2 * B)


def two_attention_groups(config: Any, runner: Any) -> None:
    group = attention_group(config)
    second = copy.deepcopy(group)
    second.layer_names = [group.layer_names.pop()]
    config.kv_cache_groups.append(second)


def no_attention_group(config: Any, runner: Any) -> None:
    for name in list(attention_group(config).layer_names):
        remove_layer(config, name)


def small_page(config: Any, runner: Any) -> None:
    change(config.kv_cache_groups, block_size=128)


def padding_in_the_pool(config: Any, runner: Any) -> None:
    # As vllm-gaudi 0.26.0 leaves it: the number of manager blocks, used as a kernel block.
    runner._send_padding_behind_pool = lambda config: None


def shared_layer(config: Any, runner: Any) -> None:
    first, second = attention_group(config).layer_names
    attention_group(config).layer_names.remove(second)
    runner.shared_kv_cache_layers[second] = first


def extra_state_blocks(config: Any, runner: Any) -> None:
    change(gdn_groups(config), num_speculative_blocks=2)


def other_cache_mode(config: Any, runner: Any) -> None:
    runner.cache_config.mamba_cache_mode = "none"


def mamba2_group(config: Any, runner: Any) -> None:
    group = gdn_groups(config)[0]
    change([group], mamba_type=type(group.kv_cache_spec.mamba_type)["MAMBA2"])


def odd_row(config: Any, runner: Any) -> None:
    groups = gdn_groups(config)
    conv, ssm = groups[0].kv_cache_spec.shapes
    change(groups, shapes=((conv[0], conv[1] - 1), ssm))


def gdn_layer_without_a_page(config: Any, runner: Any) -> None:
    remove_layer(config, attention_group(config).layer_names[-1])


LAYOUT_CASES = [
    (other_block_size, (f"block sizes of [{B}, {2 * B}] tokens", "--mamba-block-size")),
    (two_attention_groups, ("2 attention groups", "--no-enable-prefix-caching")),
    (no_attention_group, ("0 attention groups", "--no-enable-prefix-caching")),
    (small_page, ("state takes 35072 bytes, its page has 16384", "remove --block-size")),
    (padding_in_the_pool, ("kernel block 40, inside the pool of 120", "--no-enable-prefix-cach")),
    (shared_layer, ("share another layer's KV cache", "layers.7.self_attn", "--no-enable-pref")),
    (extra_state_blocks, ("2 extra state blocks", "--speculative-config")),
    (other_cache_mode, ("mamba cache mode is 'none'", "--mamba-cache-mode")),
    (mamba2_group, ("MambaSpec (MAMBA2)", "--no-enable-prefix-caching")),
    (odd_row, ("2 bytes beyond whole int32", "--no-enable-prefix-caching")),
    (gdn_layer_without_a_page, ("3 GDN layers have no attention layer", "--no-enable-prefix")),
]


@pytest.fixture
def rebuild(engines: Any) -> Iterator[Callable[..., None]]:
    """Builds the running engine's KV cache anew after doctoring its configuration."""
    runner = engines(max_num_batched_tokens=512).runner
    config = copy.deepcopy(runner.kv_cache_config)

    def build(*doctor: Callable[[Any, Any], None]) -> None:
        doctored = copy.deepcopy(config)
        for act in doctor:
            act(doctored, runner)
        # Stock code appends to both lists, and asserts that the first is empty.
        runner.kv_caches, runner.attn_groups = [], []
        runner.initialize_kv_cache(doctored)

    yield build
    runner.__dict__.pop("_send_padding_behind_pool", None)
    runner.shared_kv_cache_layers.clear()
    runner.cache_config.mamba_cache_mode = "align"
    build()


@pytest.mark.parametrize(("doctor", "says"), LAYOUT_CASES, ids=lambda v: getattr(v, "__name__", ""))
def test_kv_cache_is_refused(rebuild: Any, doctor: Any, says: tuple[str, ...]) -> None:
    text = refusal_of(lambda: rebuild(doctor), 1)
    for words in says:
        assert words in text


def test_kv_cache_names_all_problems_at_once(rebuild: Any) -> None:
    doctors = [other_block_size, padding_in_the_pool, shared_layer, extra_state_blocks]
    doctors.append(other_cache_mode)
    text = refusal_of(lambda: rebuild(*doctors), len(doctors))
    for doctor, says in LAYOUT_CASES:
        if doctor in doctors:
            for words in says:
                assert words in text


def test_no_views_remain_of_a_refused_kv_cache(rebuild: Any, engines: Any) -> None:
    refusal_of(lambda: rebuild(extra_state_blocks), 1)
    assert engines(max_num_batched_tokens=512).runner._checkpoints is None


def test_specs_are_refused_before_memory_is_profiled(engines: Any) -> None:
    engine = engines(max_num_batched_tokens=512)
    config = engine.runner.cache_config
    config.mamba_cache_mode = "none"
    try:
        text = refusal_of(engine.worker.get_kv_cache_spec, 1)
    finally:
        config.mamba_cache_mode = "align"
    assert "mamba cache mode is 'none'" in text


def test_engine_serves_after_its_kv_cache_was_built_again(rebuild: Any, engines: Any) -> None:
    """The doctored configurations above were refused for what they are, not for the rebuilding."""
    rebuild()
    engine = engines(max_num_batched_tokens=512)
    engine.llm.reset_prefix_cache()
    tokens, salt = harness.prompt(5, 2 * B + 30), driving.salt()
    expected = driving.cold(engine, tokens, 6)
    first, hit = (engine.run([tokens], max_tokens=6, salt=salt)[0] for _ in range(2))
    assert (first.cached_tokens, hit.cached_tokens) == (0, 2 * B)
    assert first.distance(expected) == hit.distance(expected) == 0.0


@pytest.mark.parametrize("caching", [True, False])
def test_replay_that_is_asked_for_on_gaudi_is_refused(models: Any, caching: bool) -> None:
    """ReplaySSM is not served here: asked for and not active would be a silent fallback."""
    config = _config_with(models, {"gaudi_ext": {"replay": "auto"}}, caching)
    assert config.additional_config == {"gaudi_ext": {"replay": "auto"}}
    with pytest.raises(RuntimeError, match="replay is 'on', and ReplaySSM is not served on Gaudi"):
        _config_with(models, {"gaudi_ext": {"replay": "on"}}, caching)


def test_unknown_option_is_refused(models: Any) -> None:
    with pytest.raises(ValueError, match="unknown option 'replays'"):
        _config_with(models, {"gaudi_ext": {"replays": "on"}}, True)


def _config_with(models: Any, additional: dict[str, Any], caching: bool) -> Any:
    import tiny_models
    from vllm.engine.arg_utils import EngineArgs
    from vllm_gaudi.extension.runtime import clear_config

    options = harness.OPTIONS | {"enable_prefix_caching": caching}
    options["additional_config"] = additional
    clear_config()
    try:
        return EngineArgs(model=str(models(tiny_models.DENSE)), **options).create_engine_config()
    finally:
        clear_config()


# With prefix caching off.


@pytest.mark.parametrize("case", CONFIG_CASES, ids=lambda case: case.name)
def test_configuration_without_caching_is_left_to_vllm_gaudi(
    models: Any, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    import tiny_models
    from vllm.engine.arg_utils import EngineArgs
    from vllm_gaudi.extension.runtime import clear_config

    for name, value in case.env.items():
        monkeypatch.setenv(name, value)
    options = harness.OPTIONS | {"enable_prefix_caching": False} | case.options
    clear_config()
    try:
        config = EngineArgs(model=str(models(tiny_models.DENSE)), **options).create_engine_config()
    finally:
        clear_config()
    assert config.scheduler_config.scheduler_cls == case.options.get("scheduler_cls")
    ours = "vllm_gaudi_ext.worker.GaudiExtWorker"
    assert config.parallel_config.worker_cls == case.options.get("worker_cls", ours)


def test_engine_without_caching_starts_where_caching_is_refused(engines: Any) -> None:
    engine = engines(
        env={"VLLM_COMPACT_GDN": "0", "VLLM_CONTIGUOUS_PA": "true"},
        enable_prefix_caching=False,
        max_num_batched_tokens=256,
        long_prefill_token_threshold=128,
    )
    assert not engine.runner._compact_gdn_enabled
    tokens = harness.prompt(6, B + 100)
    results = [engine.run([tokens], max_tokens=4)[0] for _ in range(2)]
    assert results[0].distance(results[1]) == 0.0
    assert results[1].cached_tokens == 0


def test_engine_without_caching_is_the_stock_engine_with_our_worker(engines: Any) -> None:
    engine = engines(enable_prefix_caching=False)
    runner = engine.runner
    assert type(engine.worker).__module__ == "vllm_gaudi_ext.worker"
    assert type(runner).__module__ == "vllm_gaudi_ext.runner"
    assert runner._checkpoints is None
    name = f"{type(engine.scheduler).__module__}.{type(engine.scheduler).__qualname__}"
    assert name == stock.results()["uncached"]["scheduler"] == STOCK_SCHEDULER
    found = stock.uncached_answers(engine)
    assert found == stock.results()["uncached"]["answers"]
    assert stock.results()["uncached"]["padding block"] == runner._PAD_BLOCK_ID
    assert runner._save_after_step == ()


def test_model_without_gdn_layers_is_left_to_vllm_gaudi(engines: Any, tmp_path: Any) -> None:
    """Prefix caching on such a model is stock's own: its scheduler, its block of 128 tokens."""
    engines.stop()
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512}
    config |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config |= {"max_position_embeddings": 4096, "dtype": "bfloat16", "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "limit_mm_per_prompt": None}
    with harness.start(tmp_path, max_num_batched_tokens=B, **options) as engine:
        name = f"{type(engine.scheduler).__module__}.{type(engine.scheduler).__qualname__}"
        assert name == STOCK_SCHEDULER
        assert type(engine.worker).__module__ == "vllm_gaudi_ext.worker"
        assert engine.runner._checkpoints is None
        first, hit = (engine.run([harness.prompt(7, 900)], salt="plain")[0] for _ in range(2))
        assert (first.cached_tokens, hit.cached_tokens) == (0, 7 * 128)
        assert hit.distance(first) == 0.0
