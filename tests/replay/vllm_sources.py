"""Child process: what a vLLM version says of itself, from its unpacked wheel.

`python vllm_sources.py < NAMES.json`, with that version's folder first on PYTHONPATH. Answers in
JSON what each dotted name is, and what this package does when it meets that vLLM: it registers
itself twice, imports every module of its own that needs vLLM, and compares each method that it
overrides with the one that it replaces. Nothing is installed and no engine is started; the compiled
parts of vLLM are not there and not needed.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OURS = (
    "cuda_ext.backend.replay_attn",
    "cuda_ext.layers.gdn_replay",
    "cuda_ext.metrics.stat_logger",
    "cuda_ext.startup",
)


def ask(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """The answers of the vLLM in `folder`.

    Raises:
        AssertionError: the process failed; with the end of what it said.
    """
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(sorted(names)),
        env={
            **os.environ,
            "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
            "VLLM_PLUGINS": "",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def find(name: str) -> Any:
    """The object of a dotted name.

    Raises:
        ImportError, AttributeError: it is not there.
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            # One of its own imports is missing: that is another fault.
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for part in parts[count:]:
            # A module may make a name when it is asked for; of a class the descriptor is wanted.
            look_up = getattr if inspect.ismodule(found) else inspect.getattr_static
            found = look_up(found, part)
        return found
    raise ImportError(name)


def describe(name: str) -> dict[str, Any]:
    """What a name is; `missing` says why it is nothing."""
    try:
        found = find(name)
    except (ImportError, AttributeError) as error:
        return {"missing": f"{type(error).__name__}: {error}"}
    wrapped = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
    answer: dict[str, Any] = {"type": type(found).__name__, "value": _plain(found)}
    if isinstance(found, property):
        return answer
    if inspect.isclass(found):
        answer["names"] = dir(found)
        answer["sets"] = sorted(set().union(*map(_sets, found.__mro__)))
        answer["fields"] = _fields(found)
        answer["without_default"] = [name for name, has in _fields(found).items() if not has]
    if callable(wrapped):
        answer["takes"] = parameters(wrapped)
        answer["source"] = _source(wrapped)
    return answer


def _plain(found: Any) -> Any:
    return found if isinstance(found, (bool, int, str, type(None))) else repr(found)


def _source(found: Any) -> str:
    try:
        return inspect.getsource(found)
    except (OSError, TypeError):
        return ""


def _fields(found: type) -> dict[str, bool]:
    """Fields of a dataclass, and whether each has a default."""
    if not dataclasses.is_dataclass(found):
        return {}
    missing = dataclasses.MISSING
    return {
        field.name: not (field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(found)
    }


def _sets(found: type) -> set[str]:
    """Names that a class's own methods set on self."""
    if not found.__module__.startswith("vllm."):
        return set()
    tree = ast.parse(textwrap.dedent(_source(found)) or "pass")
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def parameters(function: Any) -> list[list[Any]]:
    """[name, kind, whether it may be left out] of each parameter."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    empty = inspect.Parameter.empty
    return [[p.name, p.kind.name, p.default is not empty] for p in signature.parameters.values()]


def overrides() -> list[dict[str, Any]]:
    """Every method of our classes that replaces one of vLLM's, with both signatures."""
    found = []
    for module in sorted(name for name in sys.modules if name.startswith("cuda_ext.")):
        for owner in vars(sys.modules[module]).values():
            if not inspect.isclass(owner) or owner.__module__ != module:
                continue
            bases = [base for base in owner.__mro__[1:] if base.__module__.startswith("vllm.")]
            # A mixin's methods meet vLLM's in the classes that it is mixed into.
            own = [owner] + [b for b in owner.__mro__[1:] if b.__module__.startswith("cuda_ext.")]
            names = {
                name
                for part in own
                for name in vars(part)
                if inspect.isroutine(_function(vars(part)[name]))
            }
            for name in sorted(names):
                theirs = next((vars(base)[name] for base in bases if name in vars(base)), None)
                if theirs is None or (name.startswith("__") and name != "__init__"):
                    continue
                ours = next(vars(part)[name] for part in own if name in vars(part))
                found.append(
                    {
                        "name": f"{module}.{owner.__name__}.{name}",
                        "ours": parameters(_function(ours)),
                        "theirs": parameters(_function(theirs)),
                    }
                )
    return found


def _function(found: Any) -> Any:
    return found.__func__ if isinstance(found, (classmethod, staticmethod)) else found


def meet() -> dict[str, Any]:
    """What this package does in this vLLM."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor import custom_op
    from vllm.model_executor.models import ModelRegistry

    from cuda_ext import plugin
    from cuda_ext.facts import ARCHITECTURES

    plugin.register()
    ours = [name for name in sys.modules if name.startswith(("cuda_ext.models", "cuda_ext.layers"))]
    methods = [vars(EngineArgs)[name] for name in _replaced()]
    plugin.register()
    registered = {name: repr(ModelRegistry.models.get(name)) for name in ARCHITECTURES}
    answer: dict[str, Any] = {
        "imported by registering": ours,
        "registered": registered,
        "replaced once": methods == [vars(EngineArgs)[name] for name in _replaced()],
        "replaced": [hasattr(method, "_gaudi_ext_replay") for method in methods],
    }
    for module in (*OURS, *dict.fromkeys(ARCHITECTURES.values())):
        importlib.import_module(module)
    layer = custom_op.op_registry_oot["QwenGatedDeltaNetAttention"]
    answer["layer"] = f"{layer.__module__}.{layer.__qualname__}"
    answer["abstract"] = sorted(getattr(layer, "__abstractmethods__", ()))
    answer["bases"] = [base.__name__ for base in layer.__mro__]
    answer["binding"] = binding(layer)
    # As vLLM's registry asks a model class (`_ModelInfo.from_model_cls`).
    answer["replays of its own"] = [
        f"{module.__name__}.{name}"
        for module in (find(f"vllm.model_executor.models.{m}") for m in ("qwen3_5", "qwen3_next"))
        for name in ARCHITECTURES
        if getattr(getattr(module, name, None), "supports_replayssm", False)
    ]
    answer["planning"] = planning()
    answer["overrides"] = overrides()
    return answer


def _replaced() -> tuple[str, str]:
    from cuda_ext.compat import engine_args

    return engine_args._SET_DEFAULTS, engine_args._CREATE


def binding(layer: Any) -> dict[str, Any]:
    """A layer that is given its pages in this vLLM's own way, and what it learned of them."""
    import torch
    from vllm.v1.worker import utils

    learned = []

    class Watching(layer):  # type: ignore[misc]
        prefix = "model.layers.0.linear_attn"

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def pages_bound(self, views: Any) -> None:
            learned.append([list(view.shape) for view in views])

        def get_state_shape(self) -> Any:
            return ((3, 2), (4, 4))

        def get_state_dtype(self) -> Any:
            return (torch.bfloat16, torch.float32)

    watching = object.__new__(Watching)
    watching.__init__()
    before = hasattr(watching, "kv_cache")
    page = 3 * 2 * 2 + 4 * 4 * 4 + 4
    raw = torch.zeros(5, 1, 1, page, dtype=torch.int8)
    if hasattr(layer, "bind_kv_cache"):
        kv_caches: Any = raw
    else:
        pages = raw.view(5, page)
        kv_caches = [
            pages[:, :12].view(torch.bfloat16).view(5, 3, 2),
            pages[:, 12:76].view(torch.float32).view(5, 4, 4),
        ]
    utils.bind_kv_cache({watching.prefix: kv_caches}, {watching.prefix: watching}, [])
    shapes = [list(view.shape) for view in watching.kv_cache]
    watching.kv_cache = []
    return {
        "before": before,
        "learned": learned,
        "shapes": shapes,
        "after": len(watching.kv_cache),
        "own method": hasattr(layer, "bind_kv_cache"),
    }


def planning() -> dict[str, Any]:
    """Two steps and a capture run of our builder, on this vLLM's own base class and batch."""
    from unittest.mock import MagicMock

    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    from cuda_ext.backend.replay_attn import ReplayBackend

    name = "model.layers.0.linear_attn"
    config = MagicMock()
    config.speculative_config.num_speculative_tokens = 3
    config.speculative_config.parallel_drafting = False
    config.num_speculative_tokens = 3
    config.scheduler_config.max_num_seqs = 4
    config.compilation_config.max_cudagraph_capture_size = None
    config.parallel_config.decode_context_parallel_size = 1
    pages = torch.zeros(6, 2), torch.zeros(6, 4, 4)
    layer = MagicMock(kv_cache=pages, replay_backend="reference", chunks_at_once=9)
    config.compilation_config.static_forward_context = {name: layer}
    spec = MambaSpec(
        block_size=64,
        shapes=((2,), (4, 4)),
        dtypes=(torch.float32, torch.float32),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
    )
    builder = ReplayBackend.get_builder_cls()(spec, [name], config, torch.device("cpu"))

    def batch(lens: list[int], computed: list[int], slots: list[int]) -> Any:
        ends = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
        known = {
            "query_start_loc": ends,
            "query_start_loc_cpu": ends,
            "seq_lens": torch.tensor([a + b for a, b in zip(lens, computed, strict=True)]),
            "num_reqs": len(lens),
            "num_actual_tokens": sum(lens),
            "max_query_len": max(lens),
            "max_seq_len": 99,
            "block_table_tensor": torch.tensor([[slot, 0] for slot in slots]),
            "slot_mapping": torch.zeros(sum(lens), dtype=torch.long),
        }
        needed = [name for name, has in _fields(CommonAttentionMetadata).items() if not has]
        return CommonAttentionMetadata(**{name: known[name] for name in needed})

    def told(metadata: Any) -> list[Any]:
        rows = metadata.rows
        plan = [x.tolist() for x in (rows.slot, rows.base, rows.start, rows.row_start)]
        return [*plan, metadata.num_prefills, metadata.num_spec_decodes, metadata.max_rows]

    first = told(builder.build(0, batch([9, 2], [0, 0], [3, 5])))
    capture = told(builder.build_for_cudagraph_capture(batch([4, 4], [20, 20], [3, 5])))
    second = told(builder.build(0, batch([4, 1], [9, 2], [3, 5]), fast_build=True))
    return {
        "is vLLM's": isinstance(builder, GDNAttentionMetadataBuilder),
        "shares block tables": builder.supports_update_block_table,
        "first": first,
        "capture": capture,
        "second": second,
    }


def main() -> None:
    """Answer on the last line of stdout."""
    names = json.load(sys.stdin)
    import vllm

    answers: dict[str, Any] = {name: describe(name) for name in names}
    answers["file"] = vllm.__file__
    answers["version"] = vllm.__version__
    # Last: it replaces some of what was described.
    answers["meeting"] = meet()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
