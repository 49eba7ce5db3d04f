"""The plug-in: what it imports, what it registers, and that it fails loudly or not at all.

In child processes, since vLLM's registries are of a process. The first tests stand in for vLLM with
a few modules, the others use the one that is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from cuda_ext.facts import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]

ENGINE_ARGS = """
    class EngineArgs:
        enable_prefix_caching = None
        additional_config = None
        speculative_config = None

        def _set_default_chunked_prefill_and_prefix_caching_args(self, model_config):
            if self.enable_prefix_caching is None:
                self.enable_prefix_caching = model_config.caches_by_default
            return "of vLLM"

        def create_engine_config(self):
            return self.config
"""
REGISTRY = """
    class ModelRegistry:
        known = [{known}]
        registered = []

        @classmethod
        def get_supported_archs(cls):
            return cls.known

        @classmethod
        def register_model(cls, name, model):
            cls.registered.append([name, model])
"""
LOGGER = """
    import logging
    init_logger = logging.getLogger
"""
KNOWN = ", ".join(map(repr, [*ARCHITECTURES, "LlamaForCausalLM"]))


@dataclass
class StandIn:
    """A folder with a vLLM of a few modules."""

    folder: Path
    files: dict[str, str] = field(default_factory=dict)

    def write(self, **changes: str) -> None:
        files = {
            "__init__": "__version__ = '0.31.0'",
            "logger": LOGGER,
            "envs": "environment_variables = {}",
            "engine/__init__": "",
            "engine/arg_utils": ENGINE_ARGS,
            "model_executor/__init__": "",
            "model_executor/models": REGISTRY.format(known=KNOWN),
            **changes,
        }
        for name, source in files.items():
            path = self.folder / "vllm" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(source), encoding="utf-8")

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        return child(code, PYTHONPATH=f"{self.folder}:{ROOT}")


def child(code: str, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `code`; what it leaves in `result` is printed as JSON on the last line."""
    program = f"import json, sys\n{dedent(code)}\nprint('result:', json.dumps(result))"
    return subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "VLLM_PLUGINS": "gaudi_ext",
            "VLLM_LOGGING_LEVEL": "INFO",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            **env,
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def result(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1].removeprefix("result:"))


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


# What is imported


@pytest.mark.parametrize(
    "module",
    [
        "cuda_ext",
        "cuda_ext.plugin",
        "cuda_ext.facts",
        "cuda_ext.refusals",
        "cuda_ext.cursor",
        "cuda_ext.ring",
        "cuda_ext.compat.engine_args",
        "cuda_ext.compat.page_binding",
        "vllm_gaudi_ext.plugin",
    ],
)
def test_importing_a_module_that_plans_brings_neither_torch_nor_vllm(module: str) -> None:
    done = child(f"""
        import {module}
        heavy = ("torch", "vllm", "triton", "transformers")
        result = [name for name in heavy if name in sys.modules]
    """)
    assert result(done) == []


def test_registering_imports_no_model_no_layer_and_no_torch(stand_in: StandIn) -> None:
    stand_in.write()
    done = stand_in.run("""
        from cuda_ext import plugin
        before = set(sys.modules)
        plugin.register()
        ours = {n for n in set(sys.modules) - before if n.startswith(("cuda_ext", "vllm_gaudi"))}
        result = [sorted(ours), "torch" in sys.modules]
    """)
    ours, torch = result(done)
    assert not torch
    assert ours
    assert not [
        name
        for name in ours
        if name.startswith(("cuda_ext.models", "cuda_ext.layers", "cuda_ext.ops", "cuda_ext.backe"))
    ]


# What is registered


def test_every_architecture_that_vllm_knows_is_registered_by_name(stand_in: StandIn) -> None:
    stand_in.write()
    done = stand_in.run("""
        from cuda_ext import plugin
        from vllm.model_executor.models import ModelRegistry
        plugin.register()
        result = dict(ModelRegistry.registered)
    """)
    assert result(done) == {name: f"{module}:{name}" for name, module in ARCHITECTURES.items()}


def test_an_architecture_that_vllm_does_not_know_is_left_alone(stand_in: StandIn) -> None:
    known = REGISTRY.format(known="'Qwen3NextForCausalLM', 'LlamaForCausalLM'")
    stand_in.write(**{"model_executor/models": known})
    done = stand_in.run("""
        from cuda_ext import plugin
        from vllm.model_executor.models import ModelRegistry
        plugin.register()
        result = [name for name, _ in ModelRegistry.registered]
    """)
    assert result(done) == ["Qwen3NextForCausalLM"]


def test_a_second_call_wraps_nothing_again(stand_in: StandIn) -> None:
    stand_in.write()
    done = stand_in.run("""
        from cuda_ext import plugin
        from vllm.engine.arg_utils import EngineArgs
        plugin.register()
        once = dict(vars(EngineArgs))
        plugin.register()
        result = [once == dict(vars(EngineArgs)), EngineArgs.create_engine_config.__name__]
    """)
    assert result(done) == [True, "create_engine_config"]


# asked, vLLM's default, replay, drafts, architecture -> what is on in the end
CACHING = [
    # The default is turned off where ReplaySSM will be active, and only there.
    (None, True, "auto", True, "Qwen3_5ForCausalLM", False),
    (None, True, "on", False, "Qwen3_5ForCausalLM", False),
    (None, True, "auto", False, "Qwen3_5ForCausalLM", True),
    (None, True, "off", True, "Qwen3_5ForCausalLM", True),
    (None, True, "auto", True, "LlamaForCausalLM", True),
    # 0.26.0 has it off by default.
    (None, False, "auto", True, "Qwen3_5ForCausalLM", False),
    # What is asked for stays, to be refused by name.
    (True, True, "auto", True, "Qwen3_5ForCausalLM", True),
    (False, True, "auto", True, "Qwen3_5ForCausalLM", False),
]


def test_prefix_caching_that_is_only_a_default_is_told_from_one_that_is_asked_for(
    stand_in: StandIn,
) -> None:
    stand_in.write()
    done = stand_in.run(f"""
        import logging, types
        told = []
        logging.getLogger().addHandler(handler := logging.Handler())
        logging.getLogger().setLevel(logging.INFO)
        handler.emit = lambda record: told.append(record.getMessage())
        from cuda_ext import plugin
        from vllm.engine.arg_utils import EngineArgs
        plugin.register()
        result = []
        for asked, by_default, replay, drafts, architecture, _ in {CACHING!r}:
            told.clear()
            args = EngineArgs()
            args.enable_prefix_caching = asked
            args.additional_config = {{"gaudi_ext": {{"replay": replay}}}}
            args.speculative_config = {{"method": "ngram"}} if drafts else None
            model = types.SimpleNamespace(architecture=architecture, caches_by_default=by_default)
            answer = args._set_default_chunked_prefill_and_prefix_caching_args(model)
            result.append([args.enable_prefix_caching, answer, list(told)])
    """)
    for case, (found, answer, told) in zip(CACHING, result(done), strict=True):
        asked, by_default, *_, on = case
        assert found == on, case
        assert answer == "of vLLM"
        turned_off = asked is None and by_default and not on
        assert len(told) == turned_off, case
        assert all("which vLLM turns on by default" in line for line in told)


def test_a_misspelt_option_ends_the_start_before_a_configuration_is_made(
    stand_in: StandIn,
) -> None:
    stand_in.write()
    done = stand_in.run("""
        from cuda_ext import plugin
        from vllm.engine.arg_utils import EngineArgs
        plugin.register()
        args = EngineArgs()
        args.additional_config = {"gaudi_ext": {"reply": "on"}}
        try:
            args.create_engine_config()
        except ValueError as error:
            result = str(error)
    """)
    assert "unknown option 'reply'" in result(done)


# A vLLM that it can't be registered with

# As vLLM loads a plugin (vllm/plugins/__init__.py): what its import raises is logged and forgotten,
# what the call raises is not.
LOADER = """
    try:
        from vllm_gaudi_ext.plugin import register_general
    except Exception as error:
        print("swallowed:", error)
    else:
        register_general()
    result = "went on"
"""
METHOD = "_set_default_chunked_prefill_and_prefix_caching_args"
UNFIT = {
    "no such method": (
        {"engine/arg_utils": ENGINE_ARGS.replace(METHOD, "_set_other_args")},
        ["AttributeError", METHOD],
    ),
    "other parameters": (
        {"engine/arg_utils": ENGINE_ARGS.replace("model_config):", "usage, model_config):")},
        ["TypeError", METHOD, "'usage'"],
    ),
    "no such class": ({"engine/arg_utils": ""}, ["ImportError", "EngineArgs"]),
    "no registry": ({"model_executor/models": ""}, ["ImportError", "ModelRegistry"]),
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("version", ["0.26.0", "0.31.0", "0.40.0"])
def test_a_vllm_that_it_does_not_fit_ends_the_process(
    stand_in: StandIn, name: str, version: str
) -> None:
    changes, told = UNFIT[name]
    stand_in.write(**{**changes, "__init__": f"__version__ = {version!r}"})
    done = stand_in.run(LOADER)
    assert done.returncode == 1, done.stdout
    assert "went on" not in done.stdout
    assert "swallowed" not in done.stdout
    assert "RuntimeError: gaudi_ext refuses to start" in done.stderr
    assert all(fragment in done.stderr for fragment in told)
    assert "ake gaudi_ext out of VLLM_PLUGINS to serve without it" in done.stderr
    told = f"vllm {version}, ReplaySSM is served with " in done.stderr
    assert told == (version != "0.31.0")
    # Neither of these would help.
    assert "replay to 'off'" not in done.stderr
    assert "ALLOW_UNTESTED_VERSIONS" not in done.stderr


@pytest.mark.parametrize("plugins", ["", "another"])
def test_a_vllm_that_does_not_name_the_plugin_is_left_alone(
    stand_in: StandIn, plugins: str
) -> None:
    stand_in.write(**{"engine/arg_utils": ""})
    done = child(LOADER, PYTHONPATH=f"{stand_in.folder}:{ROOT}", VLLM_PLUGINS=plugins)
    assert result(done) == "went on"


@pytest.mark.parametrize("replay", ["on", "auto", "off"])
def test_an_engine_that_asks_for_it_without_naming_the_plugin_is_refused(
    stand_in: StandIn, replay: str
) -> None:
    stand_in.write()
    code = f"""
        from vllm.engine.arg_utils import EngineArgs
        from vllm_gaudi_ext.plugin import register_general
        for _ in range(2):
            register_general()
        EngineArgs.config = "of vLLM"
        args = EngineArgs()
        args.additional_config = {{"gaudi_ext": {{"replay": {replay!r}}}}}
        try:
            result = args.create_engine_config()
        except RuntimeError as error:
            result = str(error)
    """
    path = f"{stand_in.folder}:{ROOT}"
    found = result(child(code, PYTHONPATH=path, VLLM_PLUGINS="another"))
    if replay == "on":
        assert "start with VLLM_PLUGINS=gaudi_ext" in found
    else:
        assert found == "of vLLM"


def test_without_naming_the_plugin_nothing_of_vllm_is_imported(stand_in: StandIn) -> None:
    stand_in.write()
    code = """
        from vllm_gaudi_ext.plugin import register_general
        register_general()
        result = [name for name in sys.modules if name.split(".")[0] in ("vllm", "torch")]
    """
    path = f"{stand_in.folder}:{ROOT}"
    assert result(child(code, PYTHONPATH=path, VLLM_PLUGINS="another")) == []


# The vLLM that is installed

IN_THE_REAL_VLLM = """
    from importlib import import_module
    from types import SimpleNamespace
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    result = {}
    load_general_plugins()
    from vllm import envs
    from vllm.model_executor.models import ModelRegistry
    from vllm_gaudi_ext import plugin
    methods = dict(vars(EngineArgs))
    plugin.register_general()
    result["imported"] = [n for n in sys.modules if n.startswith(("cuda_ext.mod", "cuda_ext.lay"))]
    result["registered"] = [n for n, m in ModelRegistry.models.items() if "cuda_ext" in str(m)]
    result["unchanged"] = methods == dict(vars(EngineArgs))
    result["known"] = "VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS" in envs.environment_variables

    from cuda_ext import plugin as replay_plugin
    taken = "Qwen3_5ForCausalLM"
    replay_plugin.prove_registered()
    ModelRegistry.register_model(taken, "theirs.models:Model")
    result["taken"] = []
    for prove in (replay_plugin.prove_registered, lambda: import_module(
        "cuda_ext.compat.worker_proof"
    )):
        try:
            prove()
        except RuntimeError as error:
            result["taken"].append(str(error))
    replay_plugin.register()
    import_module("cuda_ext.compat.worker_proof")
    result["given back"] = replay_plugin.registration_problem(taken) is None

    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn

    class Theirs(gdn.QwenGatedDeltaNetAttention):
        pass

    name = "QwenGatedDeltaNetAttention"
    PluggableLayer.register_oot(Theirs, name=name)
    result["refused"] = []
    for _ in range(2):
        try:
            import_module("cuda_ext.models.qwen3_5")
        except RuntimeError as error:
            result["refused"].append(str(error))
    result["kept"] = op_registry_oot.pop(name) is Theirs
    layers = import_module("cuda_ext.layers.gdn_replay")
    # Ours twice is no other.
    layers.register()
    result["ours"] = op_registry_oot[name] is layers.ReplayGatedDeltaNetAttention

    from cuda_ext.ring import GdnHeads, replay_layout
    layer = object.__new__(layers.ReplayGatedDeltaNetAttention)
    layer.replay = replay_layout(GdnHeads(2, 4, 128, 128, 4), 7)
    layer.prefix = "model.layers.0.linear_attn"
    needed = layer.replay.nbytes
    cache = SimpleNamespace(mamba_page_size_padded=needed - 1)
    try:
        layer.get_kv_cache_spec(SimpleNamespace(cache_config=cache))
    except RuntimeError as error:
        result["page"] = [needed, str(error)]
"""


@pytest.fixture(scope="module")
def real() -> Any:
    return result(child(IN_THE_REAL_VLLM))


@pytest.mark.engine
def test_in_the_real_vllm_it_registers_through_the_entry_point_and_once(real: Any) -> None:
    assert real["imported"] == []
    assert sorted(real["registered"]) == sorted(ARCHITECTURES)
    assert real["unchanged"]
    assert real["known"]


@pytest.mark.engine
def test_a_model_that_another_plugin_registered_later_is_refused_by_its_name(real: Any) -> None:
    """In the process that makes the configuration, and in a worker by an import."""
    assert len(real["taken"]) == 2
    for text in real["taken"]:
        assert "Qwen3_5ForCausalLM is registered to theirs.models" in text
        assert "VLLM_PLUGINS" in text
    assert real["given back"]


@pytest.mark.engine
def test_another_plugin_that_replaced_the_layer_is_refused_by_its_name(real: Any) -> None:
    assert len(real["refused"]) == 2
    for text in real["refused"]:
        assert "__main__.Theirs" in text
        assert "VLLM_PLUGINS" in text
    assert real["kept"]
    assert real["ours"]


@pytest.mark.engine
def test_a_page_that_is_too_small_is_refused_with_both_sizes(real: Any) -> None:
    needed, text = real["page"]
    for fragment in (str(needed), str(needed - 1), "model.layers.0.linear_attn", "--block-size"):
        assert fragment in text
