"""The stock engine on the emulated device: it starts, repeatedly, for every shape, and repeats.

The numbers that must hold before anything can be said about the plugin. A cold run equals a cold
run bit for bit, and the stock engine's step neither waits for the device nor mixes host and
device tensors, so that whatever these rules find in a plugin's step comes from the plugin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine is made of torch")

import harness
import tiny_models

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    harness.activate()
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    ("model", "block", "groups"),
    [(tiny_models.DENSE, 384, 3), (tiny_models.MOE, 384, 3), (tiny_models.NEXT, 256, 3)],
    ids=lambda value: getattr(value, "name", None),
)
def test_each_shape_loads_and_repeats(
    cache: Path, model: tiny_models.TinyModel, block: int, groups: int
) -> None:
    """Three engines one after another in this process."""
    before = dict(os.environ)
    with harness.start(tiny_models.write(model, cache)) as engine:
        specs = [group.kv_cache_spec for group in engine.runner.kv_cache_config.kv_cache_groups]
        assert [spec.block_size for spec in specs] == [block] * (groups + 1)
        first, second = (
            engine.run([harness.prompt(1, 500), harness.prompt(2, 200)], salt=salt)
            for salt in ("a", "b")
        )
        assert [result.cached_tokens for result in first + second] == [0] * 4
        assert [mine.distance(other) for mine, other in zip(first, second, strict=True)] == [0, 0]
        # Different prompts must tell apart, or equality above would mean nothing.
        assert first[0].tokens != first[1].tokens
        assert len(set(first[0].tokens)) > 2
    assert dict(os.environ) == before


def test_stock_step_neither_waits_nor_mixes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpu_emulation import rules

    with rules.track_placement(), harness.start(tiny_models.write(tiny_models.DENSE, cache)) as e:
        steps = []
        for name in ("execute_model", "sample_tokens"):
            original = getattr(e.runner, name)

            def strict(*args: object, _original: object = original, **kwargs: object) -> object:
                steps.append(1)
                with rules.forbid_host_sync(mixed=True):
                    return _original(*args, **kwargs)  # type: ignore[operator]

            monkeypatch.setattr(e.runner, name, strict)
        prompts = [harness.prompt(3, 500), harness.prompt(4, 300)]
        assert len(e.run(prompts, logprobs=False)) == 2
        assert len(steps) > 16
        with pytest.raises(rules.HostSyncError):
            # With log-probabilities vllm-gaudi reads them in the step: the rule does bite.
            e.run(prompts[:1], logprobs=True)


def test_warm_up_covers_the_buckets_that_a_run_uses(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.write(tiny_models.DENSE, cache)
    with harness.start(
        model, max_model_len=512, max_num_batched_tokens=512, max_num_seqs=1
    ) as engine:
        runner, warm_steps, execute = engine.runner, [], engine.runner.execute_model

        def counting(*args: object, **kwargs: object) -> object:
            warm_steps.append(kwargs.get("warmup_mode", False) or args[-1] is True)
            return execute(*args, **kwargs)

        monkeypatch.setattr(runner, "execute_model", counting)
        assert engine.warm_up() > 4
        assert warm_steps
        assert all(warm_steps)
        warmed = set(runner.seen_configs)
        first, second = (engine.run([harness.prompt(1, 300)], salt=salt)[0] for salt in "ab")
        assert first.distance(second) == 0
        # A run adds each (phase, batch, length, blocks) that it meets.
        assert runner.seen_configs == warmed


def test_an_engine_that_cannot_start_leaves_the_process_usable(cache: Path) -> None:
    model = tiny_models.write(tiny_models.DENSE, cache)
    before = dict(os.environ)
    with (
        pytest.raises(ValueError, match="max_num_batched_tokens"),
        harness.start(model, max_num_batched_tokens=100),
    ):
        pass
    assert dict(os.environ) == before
    with harness.start(model) as engine:
        assert len(engine.run([harness.prompt(1, 10)], max_tokens=2)[0].tokens) == 2


def test_spawned_engine_process_gives_the_same(cache: Path, tmp_path: Path) -> None:
    model = tiny_models.write(tiny_models.DENSE, cache)
    found = tmp_path / "result.json"
    script = tmp_path / "spawned.py"
    script.write_text(
        "import json\n"
        "from pathlib import Path\n"
        "import harness\n"
        "if __name__ == '__main__':\n"
        "    harness.activate(in_process=False)\n"
        f"    with harness.start(Path({str(model)!r})) as engine:\n"
        "        result = engine.run([harness.prompt(1, 500)], salt='a')[0]\n"
        f"    Path({str(found)!r}).write_text(json.dumps([result.tokens, result.logprobs]))\n"
    )
    env = harness.environment()
    env["PYTHONPATH"] += os.pathsep + str(Path(harness.__file__).parent)
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tokens, logprobs = json.loads(found.read_text())
    with harness.start(model) as engine:
        want = engine.run([harness.prompt(1, 500)], salt="a")[0]
    assert (tuple(tokens), tuple(logprobs)) == (want.tokens, want.logprobs)
