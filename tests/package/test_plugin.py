"""The two entry points, in child processes with stand-ins for vLLM, vllm-gaudi and Habana.

A child process, because registration happens once a process and keeps its state in modules; and
stand-ins, because the real ones would start to look for a device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = "vllm_gaudi_ext.platform.GaudiExtPlatform"

VLLM_GAUDI = """
    calls = []

    def register():
        calls.append("platform")
        return "vllm_gaudi.platform.HpuPlatform"
"""
VLLM_GAUDI_PLUGINS = """
    from vllm_gaudi import calls

    def utils(): calls.append("utils")
    def ops(): calls.append("ops")
    def models(): calls.append("models")

    def fails_once():
        calls.append("fails_once")
        if calls.count("fails_once") == 1:
            raise RuntimeError("no device yet")
"""
# Neither sorted by name nor in the order in which they must run; the others are not vllm-gaudi's.
GENERAL_PLUGINS = {
    "03.models": "vllm_gaudi.plugins:models",
    "01.utils": "vllm_gaudi.plugins:utils",
    "02.ops": "vllm_gaudi.plugins:ops",
}
FOREIGN_PLUGINS = {"00.foreign": "vllm_gaudi_other:boom", "foreign": "not_installed:boom"}


class Machine:
    """A folder of stand-in packages, and a way to run code beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def package(self, name: str, **modules: str) -> None:
        (self.folder / name).mkdir()
        for module, source in {"__init__": "", **modules}.items():
            text = dedent(source)
            (self.folder / name / f"{module}.py").write_text(text, encoding="utf-8")

    def distribution(self, name: str, version: str, general: dict[str, str]) -> None:
        folder = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(head, encoding="utf-8")
        lines = ["[vllm.general_plugins]", *(f"{k} = {v}" for k, v in general.items())]
        (folder / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def vllm(self, version: str = "0.26.0") -> None:
        self.package(
            "vllm",
            __init__=f"__version__ = {version!r}",
            envs="environment_variables = {'VLLM_KNOWN': None}",
        )

    def vllm_gaudi(
        self, version: str = "0.26.0", general: dict[str, str] = GENERAL_PLUGINS
    ) -> None:
        self.package("vllm_gaudi", __init__=VLLM_GAUDI, plugins=VLLM_GAUDI_PLUGINS)
        self.distribution("vllm-gaudi", version, general)

    def habana(self) -> None:
        self.package("habana_frameworks")

    def run(
        self,
        code: str,
        *,
        plugins: str | None = "gaudi_ext",
        bare: bool = False,
        **env: str,
    ) -> Any:
        """What `code` leaves in `result`.

        Args:
            plugins: the value of VLLM_PLUGINS, None to leave it unset.
            bare: without the packages installed here, which may hold the real vllm-gaudi.
        """
        program = f"import json\n{dedent(code)}\nprint('result:', json.dumps(result))"
        environment = {"PYTHONPATH": f"{self.folder}:{ROOT}", **env}
        if plugins is not None:
            environment["VLLM_PLUGINS"] = plugins
        done = subprocess.run(
            [sys.executable, *(["-S"] if bare else []), "-c", program],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1].removeprefix("result:"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def gaudi_host(machine: Machine) -> Machine:
    machine.vllm()
    machine.vllm_gaudi()
    machine.habana()
    machine.distribution("another-plugin", "1.0", FOREIGN_PLUGINS)
    return machine


# The platform


def test_the_platform_is_registered_and_vllm_gaudis_chained_once(gaudi_host: Machine) -> None:
    result = gaudi_host.run("""
        import vllm_gaudi
        from vllm_gaudi_ext import plugin
        result = [[plugin.register_platform() for _ in range(3)], vllm_gaudi.calls]
    """)
    assert result == [[PLATFORM] * 3, ["platform"]]


@pytest.mark.parametrize("plugins", [None, "", "hpu", "hpu,another_gaudi_ext"])
def test_nothing_is_registered_unless_it_is_named(gaudi_host: Machine, plugins: str | None) -> None:
    result = gaudi_host.run(
        """
        import sys
        from vllm_gaudi_ext import plugin
        result = [plugin.register_platform(), plugin.register_general()]
        result += [name for name in ("vllm", "vllm_gaudi") if name in sys.modules]
        """,
        plugins=plugins,
    )
    assert result == [None, None]


@pytest.mark.parametrize("present", [None, "vllm_gaudi", "habana_frameworks"])
def test_nothing_is_registered_without_the_whole_hpu_stack(
    machine: Machine, present: str | None
) -> None:
    if present == "vllm_gaudi":
        machine.vllm_gaudi()
    elif present == "habana_frameworks":
        machine.habana()
    result = machine.run(
        """
        import sys
        from vllm_gaudi_ext import plugin
        result = [plugin.hpu_stack_present(), plugin.register_platform()]
        result += [name for name in ("vllm_gaudi", "habana_frameworks") if name in sys.modules]
        """,
        bare=True,
    )
    assert result == [False, None]


def test_looking_for_the_stack_imports_none_of_it(gaudi_host: Machine) -> None:
    result = gaudi_host.run("""
        import sys
        from vllm_gaudi_ext import plugin
        result = [plugin.hpu_stack_present()]
        result += [n for n in ("vllm", "vllm_gaudi", "habana_frameworks") if n in sys.modules]
    """)
    assert result == [True]


UNSUPPORTED = pytest.mark.parametrize(
    ("vllm", "vllm_gaudi"), [("0.26.0", "0.30.0"), ("0.25.9", "0.26.0"), ("0.30.0", "0.30.0")]
)


@UNSUPPORTED
def test_untested_versions_name_the_platform_but_chain_nothing(
    machine: Machine, vllm: str, vllm_gaudi: str
) -> None:
    machine.vllm(vllm)
    machine.vllm_gaudi(vllm_gaudi)
    machine.habana()
    result = machine.run("""
        import vllm_gaudi
        from vllm_gaudi_ext import plugin
        result = [plugin.register_platform(), vllm_gaudi.calls]
    """)
    assert result == [PLATFORM, []]


@UNSUPPORTED
def test_the_platform_then_refuses_where_vllm_does_not_swallow_it(
    machine: Machine, vllm: str, vllm_gaudi: str
) -> None:
    machine.vllm(vllm)
    machine.vllm_gaudi(vllm_gaudi)
    machine.habana()
    result = machine.run("""
        import importlib
        from vllm_gaudi_ext import plugin
        try:
            importlib.import_module(plugin.register_platform().rpartition(".")[0])
        except RuntimeError as error:
            result = str(error)
    """)
    assert result.startswith("gaudi_ext refuses to start")
    assert "replay" not in result.lower()
    for project, version in (("vllm", vllm), ("vllm-gaudi", vllm_gaudi)):
        assert (f"{project} {version}," in result) == (version != "0.26.0")


def test_the_override_chains_untested_versions_too(machine: Machine) -> None:
    machine.vllm("0.30.0")
    machine.vllm_gaudi("0.30.0")
    machine.habana()
    result = machine.run(
        """
        import vllm_gaudi
        from vllm_gaudi_ext import plugin
        result = [plugin.register_platform(), vllm_gaudi.calls]
        """,
        VLLM_GAUDI_EXT_ALLOW_UNTESTED_VERSIONS="1",
    )
    assert result == [PLATFORM, ["platform"]]


# The general plugins


def test_general_plugins_run_in_the_order_of_their_names_and_once(gaudi_host: Machine) -> None:
    result = gaudi_host.run("""
        import vllm_gaudi
        from vllm_gaudi_ext import plugin
        missing = plugin.missing_general_plugins()
        for _ in range(3):
            plugin.register_general()
        result = [missing, vllm_gaudi.calls, plugin.missing_general_plugins()]
    """)
    assert result == [["01.utils", "02.ops", "03.models"], ["utils", "ops", "models"], []]


def test_a_general_plugin_that_failed_is_missing_until_it_has_run(machine: Machine) -> None:
    machine.vllm()
    machine.vllm_gaudi(general=GENERAL_PLUGINS | {"02.ops": "vllm_gaudi.plugins:fails_once"})
    machine.habana()
    result = machine.run("""
        import vllm_gaudi
        from vllm_gaudi_ext import plugin
        result = []
        for _ in range(2):
            try:
                plugin.register_general()
            except RuntimeError as error:
                result.append(str(error))
            result.append(plugin.missing_general_plugins())
        result.append(vllm_gaudi.calls)
    """)
    assert result == [
        "no device yet",
        ["02.ops", "03.models"],
        [],
        ["utils", "fails_once", "fails_once", "models"],
    ]


def test_our_variables_are_known_to_vllm_and_its_own_are_kept(gaudi_host: Machine) -> None:
    result = gaudi_host.run("""
        from vllm import envs as vllm_envs
        from vllm_gaudi_ext import envs, plugin
        plugin.register_general()
        result = [sorted(vllm_envs.environment_variables), sorted(envs.environment_variables)]
    """)
    merged, ours = result
    assert ours
    assert merged == sorted([*ours, "VLLM_KNOWN"])


def test_without_the_stack_replay_is_registered_and_vllm_gaudi_left_alone(
    machine: Machine,
) -> None:
    machine.vllm()
    machine.vllm_gaudi()
    result = machine.run(
        """
        import sys, types
        import vllm_gaudi
        from vllm import envs as vllm_envs
        import cuda_ext
        replay = cuda_ext.plugin = types.ModuleType("cuda_ext.plugin")
        replay.register = lambda: vllm_gaudi.calls.append("replay")
        sys.modules["cuda_ext.plugin"] = replay
        from vllm_gaudi_ext import plugin
        plugin.register_general()
        result = [len(vllm_envs.environment_variables) > 1, vllm_gaudi.calls]
        """,
        bare=True,
    )
    assert result == [True, ["replay"]]
