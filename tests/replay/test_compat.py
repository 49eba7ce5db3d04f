"""What `cuda_ext` relies on in vLLM, looked up in 0.26.0 and every version it is served with.

One table of names with what each must be, and what happens when our modules meet that version. The
versions are read from their unpacked wheels, in a child process each (vllm_sources.py); nothing of
theirs is installed.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cuda_ext.facts import ARCHITECTURES
from vllm_gaudi_ext import versions

from .vllm_sources import ROOT, ask

VERSIONS = ("0.26.0", "0.31.0", "0.33.0")
"""The first starts under the override of versions alone, and was run in no engine."""
SINCE_31 = ("0.31.0", "0.33.0")
EXT = ROOT / "cuda_ext"


@dataclass(frozen=True)
class Symbol:
    """A name of vLLM's, and what we take for granted of it.

    Args:
        name: dotted.
        calls: parameters that we give it, by position or name; it must need no others.
        takes: parameters that it must have first, in this order.
        fields: of a dataclass.
        sets: attributes that its methods set on self.
        has: attributes of a class.
        says: text that must stand in its source.
        value: what it must be.
        only: versions that have it; it must be absent in the others.
    """

    name: str
    calls: tuple[str, ...] | None = None
    takes: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    value: Any = None
    only: tuple[str, ...] = VERSIONS


GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
LAYER = f"{GDN}.QwenGatedDeltaNetAttention"
BACKEND = "vllm.v1.attention.backends.gdn_attn"
BUILDER = f"{BACKEND}.GDNAttentionMetadataBuilder"
MAMBA = "vllm.model_executor.layers.mamba"
FLA = "vllm.third_party.flash_linear_attention.ops"
ARGS = "vllm.engine.arg_utils.EngineArgs"
SPECS = "vllm.v1.kv_cache_interface"
MODELS = "vllm.model_executor.models"
STATES_OF_A_MODEL = [
    Symbol(
        f"{MODELS}.{module}.{model}.{method}",
        calls=("cls", "vllm_config"),
        # The text-only classes of 0.26.0 are no architecture of their own yet.
        only=SINCE_31 if model in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM") else VERSIONS,
    )
    for module, models in {
        "qwen3_5": [name for name in ARCHITECTURES if name.startswith("Qwen3_5")],
        "qwen3_next": ["Qwen3NextForCausalLM"],
    }.items()
    for model in models
    for method in ("get_mamba_state_shape_from_config", "get_mamba_state_dtype_from_config")
]
SYMBOLS = [
    # plugin.py
    Symbol(f"{MODELS}.ModelRegistry"),
    Symbol(
        f"{MODELS}.registry._ModelRegistry.register_model",
        calls=("self", "model_arch", "model_cls"),
    ),
    Symbol(f"{MODELS}.registry._ModelRegistry.get_supported_archs", calls=("self",)),
    Symbol(f"{MODELS}.registry._LazyRegisteredModel", fields=("module_name", "class_name")),
    Symbol(f"{MODELS}.registry._RegisteredModel", fields=("model_cls",)),
    # What a plug-in's call raises ends the process.
    Symbol(
        "vllm.plugins.load_general_plugins",
        says=("    for func in plugins.values():\n        func()\n",),
    ),
    # compat/worker_proof.py
    Symbol(
        "vllm.v1.worker.worker_base.WorkerWrapperBase.init_worker",
        says=("worker_extension_cls",),
    ),
    Symbol("vllm.v1.worker.worker_base.WorkerBase", sets=("vllm_config",)),
    # compat/engine_args.py
    Symbol(
        ARGS,
        fields=("enable_prefix_caching", "additional_config", "speculative_config"),
    ),
    Symbol(
        f"{ARGS}._set_default_chunked_prefill_and_prefix_caching_args",
        takes=("self", "model_config"),
        says=("if self.enable_prefix_caching is None",),
    ),
    Symbol(
        f"{ARGS}.create_engine_config",
        takes=("self",),
        says=(
            "self._set_default_chunked_prefill_and_prefix_caching_args(",
            "enable_prefix_caching=self.enable_prefix_caching",
        ),
    ),
    # compat/page_binding.py
    Symbol(f"{MAMBA}.abstract.MambaBase", has=("get_kv_cache_spec", "get_attn_backend")),
    Symbol(
        f"{MAMBA}.abstract.MambaBase.bind_kv_cache",
        takes=("self", "kv_cache"),
        says=("self.kv_cache = ",),
        only=SINCE_31,
    ),
    # packing.py: what is read off layers and specs, and the grouping that is asked for
    Symbol(
        "vllm.model_executor.layers.attention_layer_base.AttentionLayerBase",
        has=("get_kv_cache_spec", "get_attn_backend"),
    ),
    Symbol("vllm.config.set_current_vllm_config", takes=("vllm_config",)),
    Symbol(
        "vllm.v1.worker.utils.select_common_block_size",
        takes=("kv_manager_block_size", "backends"),
        says=("raise ValueError(",),
    ),
    Symbol(f"{SPECS}.KVCacheLayout", only=SINCE_31),
    Symbol("vllm.v1.attention.backend.AttentionBackend.supported_kv_cache_layouts", only=SINCE_31),
    *(
        Symbol(
            f"vllm.v1.core.{module}._get_packed_kv_cache_groups",
            says=(
                "if not layout.is_block_outermost or len(page_sizes) <= 1:",
                "states_per_block = max(anchor_bytes // spec.first_spec.page_size_bytes, 1)",
            ),
            only=(version,),
        )
        for module, version in (("kv_cache_utils", "0.31.0"), ("kv_cache_planning", "0.33.0"))
    ),
    # bench/serve/weights.py
    Symbol("vllm.model_executor.model_loader.register_model_loader", calls=("load_format",)),
    Symbol("vllm.model_executor.model_loader.dummy_loader.DummyModelLoader", has=("load_weights",)),
    # layers/gdn_replay.py
    Symbol("vllm.model_executor.custom_op"),
    Symbol("vllm.model_executor.custom_op.op_registry_oot"),
    Symbol("vllm.model_executor.custom_op.PluggableLayer"),
    Symbol(
        "vllm.model_executor.custom_op.PluggableLayer.register_oot",
        calls=("cls", "_decorated_layer_cls", "name"),
    ),
    Symbol(
        "vllm.model_executor.custom_op.PluggableLayer.__new__",
        says=("cls.__name__", "op_registry_oot"),
    ),
    Symbol(
        LAYER,
        sets=(
            "num_k_heads",
            "num_v_heads",
            "head_k_dim",
            "head_v_dim",
            "conv_kernel_size",
            "tp_size",
            "prefix",
            "conv1d",
            "A_log",
            "dt_bias",
            "activation",
            "chunk_gated_delta_rule",
            "gdn_prefill_backend",
            "_forward_method",
        ),
    ),
    Symbol(f"{LAYER}.__init__", takes=("self", "config", "vllm_config")),
    Symbol(f"{LAYER}.forward", says=("self._forward_method(",)),
    Symbol(f"{LAYER}.forward_cuda", says=("torch.ops.vllm.qwen_gdn_attention_core(",)),
    Symbol(f"{LAYER}.get_state_shape", calls=("self",)),
    Symbol(f"{LAYER}.get_state_dtype", calls=("self",)),
    Symbol(f"{LAYER}.get_kv_cache_spec", calls=("self", "vllm_config")),
    Symbol(f"{LAYER}.get_attn_backend", calls=("self",)),
    Symbol(f"{LAYER}._forward_core", calls=("self", "mixed_qkv", "b", "a", "core_attn_out")),
    Symbol(
        f"{LAYER}._fused_gdn_decode_unsupported_reason",
        calls=("self", "vllm_config"),
        only=SINCE_31,
    ),
    Symbol(f"{GDN}.qwen_gdn_attention_core", says=("self._forward_core(",)),
    # The kernel that goes past `_forward_core` may only be left out by the reason that we give.
    Symbol(
        f"{GDN}.qwen_gdn_attention_core_fused_norm_packed",
        says=("self._forward_core_fused_norm_packed(",),
        only=SINCE_31,
    ),
    Symbol("vllm.model_executor.layers.linear.UnquantizedLinearMethod", calls=()),
    Symbol(
        "vllm.model_executor.layers.linear.UnquantizedLinearMethod.process_weights_after_loading",
        takes=("self", "layer"),
    ),
    Symbol("vllm.forward_context.get_forward_context", calls=()),
    Symbol("vllm.forward_context.ForwardContext", fields=("attn_metadata", "no_compile_layers")),
    Symbol(f"{MAMBA}.mamba_utils.is_conv_state_dim_first", calls=()),
    Symbol(f"{MAMBA}.mamba_utils.MambaStateDtypeCalculator"),
    Symbol(
        f"{MAMBA}.mamba_utils.MambaStateDtypeCalculator.gated_delta_net_state_dtype",
        calls=("cls", "model_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
    ),
    Symbol("vllm.platforms.current_platform"),
    Symbol("vllm.platforms.cpu.CpuPlatform", has=("device_type", "is_cpu")),
    # models/
    Symbol(f"{MODELS}.qwen3_5"),
    Symbol(f"{MODELS}.qwen3_next"),
    *STATES_OF_A_MODEL,
    # backend/replay_attn.py
    Symbol(f"{BACKEND}.GDNAttentionBackend"),
    Symbol(f"{BACKEND}.GDNAttentionBackend.get_builder_cls", calls=()),
    Symbol(
        f"{BACKEND}.GDNAttentionMetadata",
        fields=(
            "num_prefills",
            "num_prefill_tokens",
            "num_decodes",
            "num_decode_tokens",
            "num_spec_decodes",
            "num_spec_decode_tokens",
            "num_actual_tokens",
        ),
    ),
    Symbol(
        BUILDER,
        sets=(
            "num_spec",
            "decode_cudagraph_max_bs",
            "compilation_config",
            "vllm_config",
            "device",
            "layer_names",
        ),
        has=("supports_update_block_table", "_cudagraph_support"),
    ),
    Symbol(
        f"{BUILDER}.__init__",
        calls=("self", "kv_cache_spec", "layer_names", "vllm_config", "device"),
    ),
    Symbol(
        f"{BUILDER}.build",
        takes=(
            "self",
            "common_prefix_len",
            "common_attn_metadata",
            "num_accepted_tokens",
            "num_decode_draft_tokens_cpu",
            "fast_build",
        ),
    ),
    Symbol(f"{BUILDER}.build_for_cudagraph_capture", takes=("self", "common_attn_metadata")),
    Symbol(f"{BUILDER}._cudagraph_support", value="<AttentionCGSupport.UNIFORM_BATCH: 2>"),
    Symbol("vllm.v1.attention.backend.AttentionBackend"),
    Symbol(
        "vllm.v1.attention.backend.CommonAttentionMetadata",
        fields=(
            "block_table_tensor",
            "seq_lens",
            "query_start_loc",
            "query_start_loc_cpu",
            "num_reqs",
            "num_actual_tokens",
        ),
    ),
    # startup.py
    Symbol("vllm.distributed.parallel_state.get_tensor_model_parallel_rank", calls=()),
    Symbol(f"{SPECS}.KVCacheSpec", fields=("block_size",), has=("page_size_bytes",)),
    Symbol(
        f"{SPECS}.MambaSpec",
        fields=("shapes", "dtypes", "page_size_padded", "mamba_type", "num_speculative_blocks"),
        has=("page_size_bytes",),
    ),
    Symbol(
        f"{SPECS}.FullAttentionSpec",
        fields=(
            "block_size",
            "num_kv_heads",
            "head_size",
            "dtype",
            "sliding_window",
            "attention_chunk_size",
        ),
        has=("page_size_bytes",),
    ),
    Symbol(
        f"{SPECS}.SlidingWindowSpec",
        fields=("block_size", "num_kv_heads", "head_size", "dtype", "sliding_window"),
        has=("page_size_bytes",),
    ),
    Symbol("vllm.logger.init_logger", calls=("name",)),
    # metrics/
    Symbol("vllm.plugins.STAT_LOGGER_PLUGINS_GROUP", value="vllm.stat_logger_plugins"),
    Symbol("vllm.v1.metrics.loggers.AggregateStatLoggerBase"),
    Symbol(
        "vllm.v1.metrics.loggers.AggregateStatLoggerBase.__init__",
        calls=("self", "vllm_config", "engine_indexes"),
    ),
    Symbol(
        "vllm.v1.metrics.stats.SchedulerStats", fields=("num_running_reqs", "spec_decoding_stats")
    ),
    Symbol(
        "vllm.v1.spec_decode.metrics.SpecDecodingStats",
        fields=(
            "num_drafts",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_accepted_tokens_per_pos",
        ),
    ),
    Symbol(
        "vllm.v1.metrics.stats.IterationStats",
        sets=("inter_token_latencies_iter", "finished_requests"),
    ),
    Symbol("vllm.v1.metrics.stats.FinishedRequestStats", fields=("num_generation_tokens",)),
    # facts.py and activation.py
    Symbol(
        "vllm.config.VllmConfig",
        fields=(
            "model_config",
            "cache_config",
            "parallel_config",
            "scheduler_config",
            "speculative_config",
            "kv_transfer_config",
            "additional_config",
            "compilation_config",
        ),
        has=("max_in_flight_tokens", "num_speculative_tokens"),
    ),
    Symbol(
        "vllm.config.model.ModelConfig",
        fields=("dtype", "enforce_eager", "max_model_len"),
        has=("architecture", "is_hybrid"),
        sets=("hf_text_config",),
    ),
    Symbol("vllm.config.model.ModelConfig.supports_replayssm", only=SINCE_31),
    Symbol(
        "vllm.config.cache.CacheConfig",
        fields=(
            "enable_prefix_caching",
            "mamba_cache_dtype",
            "mamba_ssm_cache_dtype",
            "mamba_page_size_padded",
            "num_gpu_blocks",
            "block_size",
        ),
    ),
    Symbol(
        "vllm.platforms.interface.Platform._align_hybrid_block_size",
        says=(
            "model_cls.get_mamba_state_shape_from_config(vllm_config)",
            "cache_config.block_size = attn_block_size",
        ),
    ),
    Symbol("vllm.config.cache.CacheConfig.use_replayssm", value=False, only=SINCE_31),
    Symbol(
        "vllm.config.parallel.ParallelConfig",
        fields=(
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "data_parallel_size",
            "enable_dbo",
            "worker_extension_cls",
        ),
        has=("use_ubatching",),
    ),
    Symbol(
        "vllm.config.speculative.SpeculativeConfig",
        fields=("num_speculative_tokens", "method", "draft_model_config", "target_model_config"),
    ),
    Symbol("vllm.config.speculative.SpeculativeConfig.uses_draft_model", calls=("self",)),
    Symbol("vllm.config.kv_transfer.KVTransferConfig", fields=("kv_connector",)),
    Symbol("vllm.config.scheduler.SchedulerConfig", fields=("max_num_seqs",)),
    Symbol("vllm.config.compilation.CompilationConfig", fields=("static_forward_context",)),
    Symbol("vllm.platforms.interface.Platform.is_rocm", calls=("self",)),
    Symbol("vllm.platforms.interface.Platform.is_cuda", calls=("self",)),
    Symbol("vllm.platforms.interface.Platform.get_device_capability", calls=("cls",)),
    Symbol("vllm.platforms.interface.DeviceCapability", has=("major", "minor")),
    # layers/kernel_steps.py and ops/chunk.py
    Symbol(
        f"{GDN}.ChunkGatedDeltaRule.forward_native",
        calls=(
            "self",
            "q",
            "k",
            "v",
            "g",
            "beta",
            "initial_state",
            "output_final_state",
            "cu_seqlens",
            "chunk_indices",
            "chunk_offsets",
            "use_qk_l2norm_in_kernel",
        ),
    ),
    Symbol(
        f"{FLA}.fused_post_conv_prep",
        calls=(
            "conv_output",
            "a",
            "b",
            "A_log",
            "dt_bias",
            "num_k_heads",
            "head_k_dim",
            "head_v_dim",
            "apply_l2norm",
            "output_g_exp",
        ),
    ),
    # compat/chunk_metadata.py
    Symbol(f"{FLA}.utils.FLA_CHUNK_SIZE", value=64),
    Symbol(f"{FLA}.index.prepare_chunk_indices", calls=("cu_seqlens", "chunk_size")),
    Symbol(f"{FLA}.index.prepare_chunk_offsets", calls=("cu_seqlens", "chunk_size")),
    Symbol("vllm.utils.torch_utils.async_tensor_h2d", calls=("data", "device", "dtype")),
    # bench/serve and bench/copy_task, which drive a whole engine
    *(
        Symbol(f"vllm.{name}")
        for name in (
            "LLM",
            "SamplingParams",
            "engine.arg_utils",
            "sampling_params.RequestOutputKind",
            "tokenizers.get_tokenizer",
            "usage.usage_lib.UsageContext",
            "utils.argparse_utils.FlexibleArgumentParser",
            "v1.engine.llm_engine",
            "v1.engine.llm_engine.LLMEngine",
        )
    ),
    Symbol(
        "vllm.v1.core.kv_cache_utils.get_max_concurrency_for_kv_cache_config",
        calls=("vllm_config", "kv_cache_config"),
    ),
    # bench/kernel.py, which is run with 0.31.0 alone: 0.26.0 has no `out`, and on a CPU vLLM puts
    # a function with fewer parameters there.
    Symbol(
        f"{MAMBA}.ops.causal_conv1d.causal_conv1d_update",
        takes=(
            "x",
            "conv_state",
            "weight",
            "bias",
            "activation",
            "conv_state_indices",
        ),
    ),
    Symbol(
        "vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating"
        ".fused_sigmoid_gating_delta_rule_update",
        calls=(
            "A_log",
            "a",
            "b",
            "dt_bias",
            "q",
            "k",
            "v",
            "initial_state",
            "cu_seqlens",
            "ssm_state_indices",
            "num_accepted_tokens",
            "use_qk_l2norm_in_kernel",
        ),
    ),
]
NAMES = [symbol.name for symbol in SYMBOLS]
# Looked up for a test of its own.
NEEDS_CUTLASS = {
    f"{MAMBA}.ops.gdn_chunk_cutedsl.prepare_metadata_cutedsl": (
        "cu_seqlens",
        "total_tokens",
        "chunk_size",
    )
}
"""Functions of modules that are for some GPUs only, with the parameters that we give them."""
EXTRA = [
    f"{MODELS}.{module}.{model}"
    for model, module in (
        *((name, "qwen3_5") for name in ARCHITECTURES if name.startswith("Qwen3_5")),
        ("Qwen3NextForCausalLM", "qwen3_next"),
    )
]
pytestmark = pytest.mark.compat
Ask = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def answers(vllm_files: Callable[[str], Path]) -> Ask:
    """What a version says, asked once."""
    return functools.cache(lambda version: ask(vllm_files(version), [*NAMES, *EXTRA]))


each_version = pytest.mark.parametrize("version", VERSIONS)


# The table


def imported(path: Path) -> set[str]:
    """Dotted names that a module of ours imports of vLLM, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] == "vllm"}
    return found


def test_every_name_that_is_imported_of_vllm_stands_in_the_table() -> None:
    found = {name: path.name for path in EXT.rglob("*.py") for name in imported(path)}
    assert len(found) > 15
    known = {*NAMES, *NEEDS_CUTLASS, "vllm"}
    missing = {name: file for name, file in found.items() if name not in known}
    assert not missing


@each_version
def test_what_cannot_be_imported_here_is_there(
    vllm_files: Callable[[str], Path], version: str
) -> None:
    """Its source is read instead."""
    for name, calls in NEEDS_CUTLASS.items():
        *package, function = name.split(".")
        text = vllm_files(version).joinpath(*package, "__init__.py").read_text(encoding="utf-8")
        (found,) = (
            node
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef) and node.name == function
        )
        names = [argument.arg for argument in found.args.args]
        assert names[: len(calls)] == list(calls)
        assert len(names) - len(found.args.defaults) <= len(calls)


def test_versions_of_the_table_are_those_that_are_served_and_the_one_before() -> None:
    admitted = [[w.admits(version) for version in VERSIONS] for w in versions.VLLM_FOR_REPLAY]
    assert admitted == [[False, True, False], [False, False, True]]


def test_no_name_stands_in_the_table_twice() -> None:
    assert len(set(NAMES)) == len(NAMES)


def wrong(symbol: Symbol, found: dict[str, Any]) -> list[str]:
    """What is not as the table says."""
    if "missing" in found:
        return [found["missing"]]
    problems = []
    takes = [name for name, _, _ in found.get("takes", ())]
    if takes[: len(symbol.takes)] != list(symbol.takes):
        problems.append(f"takes {takes}")
    if symbol.calls is not None:
        needed = [
            name
            for name, kind, has_default in found["takes"]
            if not has_default and not kind.startswith("VAR")
        ]
        catches_all = {kind for _, kind, _ in found["takes"]} & {"VAR_POSITIONAL", "VAR_KEYWORD"}
        unknown = set(symbol.calls) - set(takes)
        if set(needed) - set(symbol.calls) - {"self", "cls"} or (unknown and not catches_all):
            problems.append(f"needs {needed} of {takes}")
    for kind in ("fields", "sets", "has"):
        wanted = set(getattr(symbol, kind))
        there = set(found.get("names" if kind == "has" else kind, ()))
        if kind != "fields":
            there |= set(found.get("sets", ())) | set(found.get("names", ()))
        if wanted - there:
            problems.append(f"{kind} lacks {sorted(wanted - there)}")
    problems += [f"does not say {t!r}" for t in symbol.says if t not in found.get("source", "")]
    if symbol.value is not None and found["value"] != symbol.value:
        problems.append(f"is {found['value']!r}")
    return problems


SELF = ["self", "POSITIONAL_OR_KEYWORD", False]
NEW = ["new", "POSITIONAL_OR_KEYWORD", False]


@pytest.mark.parametrize(
    ("symbol", "found", "told"),
    [
        (Symbol("x"), {"missing": "ImportError: x"}, "ImportError: x"),
        (Symbol("x", takes=("self", "a")), {"takes": [SELF, NEW]}, "takes ['self', 'new']"),
        (Symbol("x", calls=("self",)), {"takes": [SELF, NEW]}, "needs"),
        (Symbol("x", calls=("self", "a")), {"takes": [SELF]}, "needs"),
        (Symbol("x", fields=("a",)), {"fields": {"b": True}, "names": ["a"]}, "fields lacks"),
        (Symbol("x", sets=("a",)), {"sets": ["b"], "names": ["b"]}, "sets lacks ['a']"),
        (Symbol("x", has=("a",)), {"names": ["b"]}, "has lacks ['a']"),
        (Symbol("x", says=("a(",)), {"source": "b("}, "does not say 'a('"),
        (Symbol("x", value=False), {"value": True}, "is True"),
    ],
)
def test_what_is_not_as_the_table_says_is_noticed(
    symbol: Symbol, found: dict[str, Any], told: str
) -> None:
    (problem,) = wrong(symbol, found)
    assert told in problem


@pytest.mark.engine
@each_version
def test_every_name_is_there_and_as_we_take_it(answers: Ask, version: str) -> None:
    found = answers(version)
    assert found["version"].split("+")[0] == version
    assert f"vllm-{version}" in found["file"]
    problems = {
        symbol.name: problem
        for symbol in SYMBOLS
        if version in symbol.only and (problem := wrong(symbol, found[symbol.name]))
    }
    assert not problems


@pytest.mark.engine
@each_version
def test_what_a_version_does_not_have_is_known(answers: Ask, version: str) -> None:
    found = answers(version)
    absent = [s.name for s in SYMBOLS if version not in s.only]
    assert [name for name in absent if "missing" not in found[name]] == []
    # 0.33.0 has moved the packed grouping, so each of the two later ones lacks the other's place.
    moved = [name for name in absent if name.endswith("._get_packed_kv_cache_groups")]
    assert len(moved) == (2 if version == "0.26.0" else 1)
    assert (len(absent) > len(moved)) == (version == "0.26.0")


@pytest.mark.engine
@each_version
def test_the_metadata_of_a_batch_needs_no_more_than_its_counts(answers: Ask, version: str) -> None:
    """Ours is made with these alone; a further one without a default would break every step."""
    found = answers(version)[f"{BACKEND}.GDNAttentionMetadata"]
    table = next(s for s in SYMBOLS if s.name == f"{BACKEND}.GDNAttentionMetadata")
    assert found["without_default"] == list(table.fields)


@pytest.mark.engine
@each_version
def test_vllm_serves_no_such_layer_with_a_replay_of_its_own(answers: Ask, version: str) -> None:
    """When one does, ReplaySSM must step aside for it (refusals.py)."""
    found = answers(version)
    assert all("missing" not in found[name] for name in EXTRA)
    assert found["meeting"]["replays of its own"] == []


# Our modules and that version


@pytest.mark.engine
@each_version
def test_registering_imports_no_model_and_does_it_once(answers: Ask, version: str) -> None:
    meeting = answers(version)["meeting"]
    assert meeting["imported by registering"] == []
    assert meeting["replaced"] == [True, True]
    assert meeting["replaced once"]
    # 0.26.0 has the text-only classes, but lists no architecture of that name.
    known = [n for n in ARCHITECTURES if version != "0.26.0" or "ForCausalLM" not in n] + (
        ["Qwen3NextForCausalLM"] if version == "0.26.0" else []
    )
    ours = [name for name, model in meeting["registered"].items() if "cuda_ext.models" in model]
    assert sorted(ours) == sorted(known)


@pytest.mark.engine
@each_version
def test_our_layer_takes_the_place_of_vllms(answers: Ask, version: str) -> None:
    meeting = answers(version)["meeting"]
    assert meeting["layer"] == "cuda_ext.layers.gdn_replay.ReplayGatedDeltaNetAttention"
    # Python calls no constructor of a class that is not the one that was asked for.
    assert "QwenGatedDeltaNetAttention" in meeting["bases"]
    assert meeting["abstract"] == []


@pytest.mark.engine
@each_version
def test_a_method_of_ours_takes_what_vllm_gives_the_one_it_replaces(
    answers: Ask, version: str
) -> None:
    found = answers(version)["meeting"]["overrides"]
    names = {entry["name"].rpartition(".")[2] for entry in found}
    assert {"build", "build_for_cudagraph_capture", "_forward_core", "get_kv_cache_spec"} <= names
    for entry in found:
        kinds = {kind for _, kind, _ in entry["ours"]}
        if "VAR_POSITIONAL" in kinds:
            continue
        ours = [name for name, kind, _ in entry["ours"] if not kind.startswith("VAR")]
        theirs = [name for name, _, _ in entry["theirs"]]
        assert ours[: len(theirs)] == theirs, entry
        further = entry["ours"][len(theirs) :]
        assert all(may or kind == "VAR_KEYWORD" for _, kind, may in further), entry


@pytest.mark.engine
@each_version
def test_a_layer_learns_of_its_pages_however_it_is_given_them(answers: Ask, version: str) -> None:
    """0.26.0 sets an attribute, the others call a method; taking them away again is no news."""
    binding = answers(version)["meeting"]["binding"]
    views = [[5, 3, 2], [5, 4, 4]]
    assert binding["own method"] == (version != "0.26.0")
    assert binding["learned"] == [views]
    assert binding["shapes"] == views
    assert (binding["before"], binding["after"]) == (False, 0)


@pytest.mark.engine
@each_version
def test_our_builder_plans_a_batch_of_that_version(answers: Ask, version: str) -> None:
    """A chunk of 9 and a prompt of 2 tokens, a capture run, then a decode step of each."""
    planning = answers(version)["meeting"]["planning"]
    assert planning["is vLLM's"]
    assert planning["shares block tables"] is False
    # slot, base, start, row_start; chunks, other requests, T_max
    assert planning["first"] == [[3, 5], [0, 0], [0, 0], [0, 9, 11], 1, 1, 4]
    assert planning["capture"] == [[0, 0], [0, 0], [0, 0], [0, 4, 8], 0, 2, 4]
    assert planning["second"] == [[3, 5], [9, 0], [9, 2], [0, 4, 5], 0, 2, 4]
