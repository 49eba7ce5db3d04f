"""When the plan's ReplaySSM side is packed, and what it then shows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version
from plan_helpers import DRAFTER_4B, DRAFTER_35B, DRAFTING, EIGHT_LAYERS, plan_of, serve_yaml
from typer.testing import CliRunner

from cuda_ext.packing import attention_layers
from vllm_gaudi_ext.cli.app import app
from vllm_gaudi_ext.planner.arithmetic import KV_DTYPES, kv_token_bytes
from vllm_gaudi_ext.planner.config import DrafterOverrides
from vllm_gaudi_ext.planner.facts import load_platforms
from vllm_gaudi_ext.planner.plan import WHOLE_BLOCK_BACKENDS, Plan, Side
from vllm_gaudi_ext.planner.request import Options, make_deployment
from vllm_gaudi_ext.planner.serve_args import recipe_vllm
from vllm_gaudi_ext.versions import VLLM_FOR_REPLAY


def replay_of(model: str = "Qwen3.5-4B", **options: Any) -> Side:
    given = {"platform": "h200", "drafter": DRAFTER_4B, "drafts": 15, **options}
    side = plan_of(model, **given).replay
    assert side is not None
    return side


def shown(side: Side) -> list[tuple[str, int, int]]:
    return [(group.kind, group.layers, group.groups) for group in side.groups]


def test_the_4b_packs_on_an_h200() -> None:
    side = replay_of(pool_gib=106.8)
    assert side.packed
    assert shown(side) == [("gdn", 24, 2), ("full", 13, 1)]
    assert side.group_count == 3
    assert side.group_size == 13
    assert side.block_mib * 2**20 == 36_634_624
    assert side.blocks_per_request == 14
    assert side.padding_bytes == 0
    assert side.state_bytes * 24 == side.state_mib_per_request * 2**20
    assert side.capacity is not None
    assert side.capacity.pool_blocks == int(106.8 * 2**30) // 36_634_624
    assert side.capacity.requests == 223
    assert side.capacity.state_slots == (side.capacity.pool_blocks - 1) // 2


def test_the_35b_keeps_states_and_blocks_of_its_own_size_beside_a_larger_drafter() -> None:
    side = replay_of("Qwen3.5-35B-A3B", drafter=DRAFTER_35B, overrides=EIGHT_LAYERS)
    assert shown(side) == [("gdn", 30, 2), ("full", 18, 1)]
    assert side.block_tokens == 1376
    assert [group.block_tokens for group in side.groups] == [None, 1376]
    assert side.blocks_per_request == 8
    assert side.block_mib == 69.875
    usual = replay_of("Qwen3.5-35B-A3B", drafter=DRAFTER_35B, overrides=EIGHT_LAYERS, packing="off")
    assert usual.block_tokens == 1376
    assert [group.block_tokens for group in usual.groups] == [None, 2752, 1376]
    assert usual.request_mib_padded == 688
    assert side.request_mib_padded == 559


@pytest.mark.parametrize("name", load_platforms())
def test_only_cards_whose_attention_takes_whole_blocks_pack(name: str) -> None:
    plan = plan_of(
        "Qwen3.5-4B", platform=name, drafter=DRAFTER_4B, drafts=15, caching=False, unit=16
    )
    assert not plan.native.packed
    if plan.deployment.gaudi:
        assert plan.replay is None
        return
    assert plan.replay is not None
    assert plan.replay.packed == (name in ("a100", "h100", "h200"))


def test_a_card_that_is_not_known_does_not_pack() -> None:
    assert not replay_of(platform=None, unit=16).packed


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({}, True),
        ({"unit": 128}, True),
        ({"block_size": 64}, True),
        ({"tp": 4}, True),
        ({"packing": "auto"}, True),
        ({"packing": "off"}, False),
        ({"vllm": ">=0.31.0,<0.31.1"}, True),
        ({"vllm": ">=0.33"}, True),
        ({"vllm": ">=0.26.0,<0.26.1"}, False),
        ({"vllm": "newest"}, False),
        # Its pages are not plain K and V.
        ({"kv_dtype": "fp8"}, False),
        ({"attention_backends": ()}, True),
        ({"attention_backends": ("FLASH_ATTN",)}, True),
        ({"attention_backends": ("FLASH_ATTN", "TRITON_ATTN")}, True),
        ({"attention_backends": ("FLASHINFER",)}, False),
        ({"attention_backends": ("FLEX_ATTENTION",)}, False),
        ({"attention_backends": ("FLASH_ATTN", "FLASHINFER")}, False),
        # A block of a window's takes a whole one of the pool's.
        ({"overrides": DrafterOverrides(sliding_layers=4, window=2048)}, False),
        # Blocks that are counted are vLLM's own.
        ({"pool_blocks": 8000, "pool_bytes": None}, False),
        # Nothing to gain.
        ({"drafter": None}, False),
    ],
)
def test_what_decides(options: dict[str, Any], packed: bool) -> None:
    assert replay_of(**options).packed is packed


# The torch dtype in which vLLM keeps what is not kept as it is (STR_DTYPE_TO_TORCH_DTYPE,
# vllm/utils/torch_utils.py of 0.31.0).
STORED = {"fp8_inc": "float8_e4m3fn", "int8_per_token_head": "int8"}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_kv_dtype_packs_where_the_server_takes_its_pages_for_plain(kv_dtype: str) -> None:
    plain = kv_dtype in ("float32", "bfloat16", "float16")
    stored = kv_dtype if plain else STORED.get(kv_dtype, "uint8")
    shapes = [
        SimpleNamespace(
            num_kv_heads=heads,
            head_size=size,
            dtype=f"torch.{stored}",
            block_size=16,
            page_size_bytes=16 * kv_token_bytes(heads, size, kv_dtype),
        )
        for heads, size in ((4, 256), (8, 128))
    ]
    side = replay_of(kv_dtype=kv_dtype)
    assert side.packed == (attention_layers(shapes) is not None)
    assert side.packed == plain


def test_the_longest_request_decides_and_not_the_one_that_is_asked_about() -> None:
    """As in the server, which knows no other. Of one block, these take 42 pages either way."""
    shape: dict[str, Any] = {"overrides": DrafterOverrides(layers=6)}
    assert not replay_of(tokens=600, **shape).packed
    assert replay_of(tokens=600, max_model_len=32768, **shape).packed
    assert not replay_of(tokens=600, max_model_len=-1, **shape).packed


def test_every_vllm_that_replay_is_served_with_packs() -> None:
    assert [window.first for window in VLLM_FOR_REPLAY] == ["0.31.0", "0.33.0"]
    for window in VLLM_FOR_REPLAY:
        assert Version(window.first) >= Version("0.31.0")
        assert window.admits(window.first)
        assert replay_of(vllm=str(window.supported)).packed


def serve(
    folder: Path, monkeypatch: pytest.MonkeyPatch, recipe: str | None = None, **arguments: Any
) -> bool:
    """Whether a serve.yaml of the 4B with these arguments packs."""
    path = serve_yaml(folder, monkeypatch, recipe, **arguments)
    monkeypatch.setattr("vllm_gaudi_ext.planner.request._with_reading", lambda options: options)
    deployment = make_deployment(Options(serve=path, platform="h200"))
    return deployment.may_pack


@pytest.mark.parametrize(
    ("options", "packs"),
    [
        ({"gaudi_ext": {"replay": "on"}}, True),
        ({"gaudi_ext": {"packing": "auto"}}, True),
        ({"gaudi_ext": {"packing": "off"}}, False),
        # A bare off of YAML.
        ({"gaudi_ext": {"packing": False}}, False),
        # Refused by the server and by preflight; the plan goes by the default.
        ({"gaudi_ext": {"packing": "tight"}}, True),
        (None, True),
    ],
)
def test_the_option_is_read_from_the_serve_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, packs: bool
) -> None:
    assert serve(tmp_path, monkeypatch, additional_config=options) is packs


class Backend:
    """A member of vLLM's AttentionBackendEnum, which holds its class's path as its value."""

    def __init__(self, name: str) -> None:
        self.name, self.value = name, f"vllm.{name}"

    def __repr__(self) -> str:
        # Part of the tests' ids, which all processes of a run must agree on.
        return self.name


@pytest.mark.parametrize(
    ("arguments", "packs"),
    [
        ({"attention_backend": None, "attention_config": None}, True),
        ({"attention_backend": "auto"}, True),
        ({"attention_backend": "FLASH_ATTN"}, True),
        ({"attention_backend": "triton_attn"}, True),
        ({"attention_backend": "FLASHINFER"}, False),
        ({"attention_backend": Backend("FLASHINFER")}, False),
        ({"attention_backend": Backend("TRITON_ATTN")}, True),
        ({"attention_config": {"backend": "FLASHINFER"}}, False),
        ({"attention_config": {"backend": "FLASH_ATTN"}}, True),
        ({"attention_config": {"flash_attn_version": 3}}, True),
        ({"attention_config": SimpleNamespace(backend=Backend("FLEX_ATTENTION"))}, False),
        # As written, where vLLM's parser is absent.
        ({"attention_config": json.dumps({"backend": "FLASHINFER"})}, False),
        ({"attention_config": "FLASHINFER"}, True),
        ({"attention_config": {"backend_per_kind": {"full_attention": "FLASHINFER"}}}, False),
        (
            {
                "attention_config": {
                    "backend": "FLASHINFER",
                    "backend_per_kind": {"full_attention": "FLASH_ATTN"},
                }
            },
            True,
        ),
        ({"attention_config": {"backend_per_kind": {"sliding_window": "FLASHINFER"}}}, True),
    ],
    ids=str,
)
def test_the_attention_backend_is_read_from_the_serve_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], packs: bool
) -> None:
    assert serve(tmp_path, monkeypatch, **arguments) is packs


@pytest.mark.parametrize(
    ("target", "drafter", "packs"),
    [
        (None, "FLASHINFER", False),
        ("FLASH_ATTN", "FLASHINFER", False),
        ("FLASHINFER", "FLASH_ATTN", False),
        ("FLASH_ATTN", "TRITON_ATTN", True),
    ],
)
def test_the_drafters_attention_must_take_whole_blocks_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str | None,
    drafter: str,
    packs: bool,
) -> None:
    drafting = {**DRAFTING, "attention_backend": drafter}
    given = {"attention_backend": target, "speculative_config": drafting}
    assert serve(tmp_path, monkeypatch, **given) is packs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention_backends": ("FLASHINFER",)}, True),
        ({"attention_backends": ("FLASHINFER",), "replay": "on"}, True),
        ({"attention_backends": ("FLASHINFER",), "replay": "off"}, False),
        ({"attention_backends": ("FLASHINFER",), "packing": "off"}, False),
        # Nothing would be gained there.
        ({"attention_backends": ("FLASHINFER",), "platform": "b200"}, False),
        ({"attention_backends": ("TRITON_ATTN",)}, False),
        ({}, False),
    ],
)
def test_an_attention_backend_that_costs_requests_is_named(
    options: dict[str, Any], said: bool
) -> None:
    plan = plan_of(
        "Qwen3.5-4B", **{"platform": "h200", "drafter": DRAFTER_4B, "drafts": 15, **options}
    )
    texts = [f.text for f in plan.findings if f.code == "backend-splits-blocks"]
    assert len(texts) == said
    if said:
        assert "attention backend FLASHINFER" in texts[0]
        assert all(name in texts[0] for name in WHOLE_BLOCK_BACKENDS)


@pytest.mark.parametrize(
    ("recipe", "versions", "packs"),
    [
        (None, None, True),
        ("requires:\n  vllm: '>=0.31.0,<0.31.1'\n", ">=0.31.0,<0.31.1", True),
        ("requires:\n  vllm: '>=0.26.0,<0.26.1'\n", ">=0.26.0,<0.26.1", False),
        ("requires:\n  vllm-gaudi: '>=0.26.0'\n", None, True),
        ("requires: 0.26\n", None, True),
    ],
)
def test_the_version_is_the_recipes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str | None,
    versions: str | None,
    packs: bool,
) -> None:
    assert serve(tmp_path, monkeypatch, recipe) is packs
    assert recipe_vllm(tmp_path / "serve.yaml") == versions


def test_the_table_shows_the_packed_groups_beside_vllms() -> None:
    arguments = ["plan", "Qwen3.5-4B", "--platform", "h200", "--drafter", DRAFTER_4B]
    result = CliRunner().invoke(app, [*arguments, "--drafts", "15"], env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    for text in (
        "8: 5 gdn of 24 layers, 2 full of 8 layers / 592 tokens, 1 full of 5 layers / 592 tokens",
        "3: 2 gdn of 24 layers, 1 full of 13 layers / 688 tokens",
        "11.56 MiB (5 pages)",
        "34.94 MiB (packed)",
        "2.66 MiB a state, 2.69 MiB attention",
        "489.12 MiB",
    ):
        assert text in result.stdout, text


def test_the_finding_counts_the_packed_requests() -> None:
    plan: Plan = plan_of("Qwen3.5-4B", platform="h200", drafter=DRAFTER_4B, drafts=15)
    text = next(finding.text for finding in plan.findings if finding.code == "replay")
    assert "64 MiB of state instead of 888: 2.88x as many requests" in text
