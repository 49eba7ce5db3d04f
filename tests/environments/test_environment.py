"""The environments' maker: pinned lists, where vllm-gaudi may come from, and the ways without."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
LISTS = sorted(HERE.glob("*.txt"))


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """environment.py, with a .venvs of its own."""
    spec = importlib.util.spec_from_file_location("environment_maker", HERE / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up.
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENVS", tmp_path / "venvs")
    module.VENVS.mkdir()
    return module


class RecordedSteps:
    """Stands in for `Steps`: writes commands down, and lets `act` do their work."""

    def __init__(self, act: Callable[[list[str]], None]) -> None:
        self.commands: list[list[str]] = []
        self._act = act

    def run(self, what: str, command: list[Any], **limits: Any) -> None:
        self.commands.append([str(part) for part in command])
        self._act(self.commands[-1])


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.name)
def test_every_line_is_a_pin(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(
            r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.+]*(; [a-z_]+ [<>=]+ \"[^\"]+\")?", line
        )


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.name)
@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_no_package_is_pinned_twice_for_one_python(path: Path, python: str) -> None:
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for line in path.read_text().splitlines() if "==" in line]
    names = [
        requirement.name.lower().replace("_", "-")
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python})
    ]
    assert len(names) == len(set(names))


def test_find_links_are_read_from_pips_files_and_from_the_variable_that_hides_them(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = maker.ENVIRONMENTS["gaudi"]
    environment.python.parent.mkdir(parents=True)
    # pip's answer to `config get`; like pip it says nothing when told to be quiet.
    environment.python.write_text(
        '#!/bin/sh\ncase "$*" in *-q*) ;; *global.find-links) echo "/a /b";; *) exit 1;; esac\n'
    )
    environment.python.chmod(0o755)
    monkeypatch.setenv("PIP_FIND_LINKS", "/b /c")
    assert maker.find_links(environment) == ["/a", "/b", "/c"]


def test_vllm_gaudi_is_never_asked_of_a_registry(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maker, "_output", lambda *_, **__: None)

    def fail(_: list[str]) -> None:
        raise maker.EnvironmentFailure("not there")

    steps = RecordedSteps(fail)
    with pytest.raises(maker.EngineMissing, match=r"find-links.*gave no v0\.26\.0"):
        maker.gaudi_wheel(maker.ENVIRONMENTS["gaudi"], steps)
    (command,) = steps.commands
    assert "--no-index" in command


def test_vllm_gaudi_is_built_from_the_known_commit(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = f"{maker.GAUDI_COMMIT}\trefs/tags/{maker.GAUDI_TAG}"
    monkeypatch.setattr(
        maker, "_output", lambda command, **_: answer if "ls-remote" in command else None
    )

    def build(command: list[str]) -> None:
        if "--no-index" in command:
            raise maker.EnvironmentFailure("not there")
        (maker.VENVS / "wheels" / "vllm_gaudi-0.26.0-py3-none-any.whl").touch()

    steps = RecordedSteps(build)
    wheel = maker.gaudi_wheel(maker.ENVIRONMENTS["gaudi"], steps)
    assert wheel.name == "vllm_gaudi-0.26.0-py3-none-any.whl"
    assert steps.commands[-1][-1] == f"git+{maker.GAUDI_REPOSITORY}@{maker.GAUDI_COMMIT}"


def test_a_tag_that_moved_is_an_error_and_no_reason_to_skip(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "0" * 40 + "\trefs/tags/v0.26.0"
    monkeypatch.setattr(
        maker, "_output", lambda command, **_: other if "ls-remote" in command else None
    )

    def fail(_: list[str]) -> None:
        raise maker.EnvironmentFailure("not there")

    with pytest.raises(maker.EnvironmentFailure, match="no longer") as caught:
        maker.gaudi_wheel(maker.ENVIRONMENTS["gaudi"], RecordedSteps(fail))
    assert not isinstance(caught.value, maker.EngineMissing)


def test_without_vllm_gaudi_the_bare_environment_is_used_and_the_reason_handed_on(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(environment: Any) -> None:
        made.append(environment.name)
        if environment.gaudi:
            raise maker.EngineMissing("no wheel\nand no tag")

    monkeypatch.setattr(maker, "make", make)
    environment, variables = maker.prepare("gaudi-or-dev")
    assert (environment.name, made) == ("dev", ["gaudi", "dev"])
    assert variables == {"GAUDI_ENV_MISSING": "no wheel and no tag"}


def test_without_a_python_for_it_the_cpu_engine_is_left_out_with_the_reason(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maker, "usable_pythons", lambda versions: iter(()))
    with pytest.raises(maker.EngineMissing, match=r"no Python 3\.10 or .* on PATH"):
        maker.make(maker.ENVIRONMENTS["cpu"])
    made = []

    def make(environment: Any) -> None:
        made.append(environment.name)
        if environment.engine:
            raise maker.EngineMissing("no Python 3.10 on PATH")

    monkeypatch.setattr(maker, "make", make)
    environment, variables = maker.prepare("cpu-or-dev")
    assert (environment.name, made) == ("dev", ["cpu", "dev"])
    assert variables == {"CPU_ENV_MISSING": "no Python 3.10 on PATH"}
    # Asked for by its own name, it is an error.
    assert maker.main(["cpu", "--", "true"]) == 1


def test_site_files_are_copied_into_the_packages_and_change_the_stamp(
    maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = maker.ENVIRONMENTS["cpu"]
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.setattr(maker, "_output", lambda command, **_: str(packages))
    maker._copy_site_files(cpu)
    names = {Path(name).name for name in cpu.site_files}
    assert {path.name for path in packages.iterdir()} == names
    assert any(name.endswith(".pth") for name in names)
    before = cpu.stamp()
    for name in cpu.site_files:
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((maker.ROOT / name).read_bytes())
    (tmp_path / "pyproject.toml").write_bytes((maker.ROOT / "pyproject.toml").read_bytes())
    monkeypatch.setattr(maker, "ROOT", tmp_path)
    assert cpu.stamp() == before
    (tmp_path / cpu.site_files[0]).write_text("pass\n")
    assert cpu.stamp()["pins"] != before["pins"]


def test_the_import_hook_declares_what_an_extension_that_did_not_load_would_have(
    tmp_path: Path,
) -> None:
    """With stand-ins for torch and torchvision: the order of events is what matters."""
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace as Names\n"
        "said = []\n"
        "ops = Names(torchvision=Names())\n"
        "class Library:\n"
        "    def __init__(self, *names): pass\n"
        "    def define(self, schema):\n"
        "        said.append(schema.split('(')[0])\n"
        "        setattr(ops.torchvision, said[-1], None)\n"
        "library = Names(Library=Library)\n"
    )
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from . import extension\nfrom . import uses\n")
    (package / "extension.py").write_text(
        "import os, torch\n"
        "assert torch.said == [], 'declared before the extension had its chance'\n"
        "if 'LOADS' in os.environ: torch.ops.torchvision.nms = torch.ops.torchvision.qnms = 1\n"
    )
    (package / "uses.py").write_text("import torch\nassert hasattr(torch.ops.torchvision, 'nms')\n")
    hook = HERE.parent / "emulated_hpu/path/hpu_emulation/torchvision_schema.py"
    (tmp_path / hook.name).write_bytes(hook.read_bytes())
    lines = (HERE / "cpu.pth").read_text().splitlines()
    (line,) = [line for line in lines if "torchvision" in line]
    code = (
        f"import sys; {line}; assert 'torch' not in sys.modules\n"
        "import torchvision, torch; print(*torch.said)\n"
    )
    for loads, said in (({}, "nms qnms"), ({"LOADS": "1"}, "")):
        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            env={"PYTHONPATH": str(tmp_path)} | loads,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr


def test_a_failed_install_is_no_reason_to_go_on_without_the_engine(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(environment: Any) -> None:
        raise maker.EnvironmentFailure("198 pinned packages: exit code 1")

    monkeypatch.setattr(maker, "make", make)
    assert maker.main(["gaudi-or-dev", "--", "true"]) == 1


def test_a_changed_pin_and_a_changed_pyproject_change_their_halves_of_the_stamp(
    maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (*LISTS, maker.ROOT / "pyproject.toml"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(maker, "HERE", tmp_path)
    monkeypatch.setattr(maker, "ROOT", tmp_path)
    gaudi = maker.ENVIRONMENTS["gaudi"]
    first = gaudi.stamp()
    (tmp_path / "gaudi-no-deps.txt").write_text("torchvision==0.28.1\n")
    second = gaudi.stamp()
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    third = gaudi.stamp()
    assert second["pins"] != first["pins"]
    assert second["package"] == first["package"]
    assert third["package"] != second["package"]
    assert third["pins"] == second["pins"]


def test_a_made_environment_is_left_alone(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    dev = maker.ENVIRONMENTS["dev"]
    dev.python.parent.mkdir(parents=True)
    dev.python.touch()
    (dev.folder / "made.json").write_text(maker.json.dumps(dev.stamp()))
    monkeypatch.setattr(maker, "Steps", None)
    maker.make(dev)


def test_a_step_past_its_limit_ends_with_all_that_it_started(
    maker: ModuleType, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid_file}; wait"
    with pytest.raises(maker.EnvironmentFailure, match="no end after 1 s"):
        maker.Steps("dev").run("a long step", ["sh", "-c", script], limit=1)
    child = int(pid_file.read_text())
    # A killed process may wait to be reaped by whoever inherited it.
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
