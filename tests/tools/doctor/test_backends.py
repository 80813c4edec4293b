"""``kvbus doctor``: the plugins of NIXL, and the backends of an agent's config."""

from pathlib import Path

from tests.support.agents import write_config
from tests.support.nixl_plugins import BROKEN, TWIN, plugin_environment
from tests.tools.doctor.running import doctor


def test_backends_of_config_are_read_with_and_plugins_listed(folder: Path) -> None:
    path, binds = folder / "agent.toml", dict.fromkeys(("peer_bind", "events_bind"), "tcp://lo:0")
    wanted = {"nixl_backends": [TWIN, BROKEN, "UCX", "POSIX"], "runtime_dir": str(folder / "run")}
    write_config(path, {"agent_id": "one", **binds, **wanted})

    env = plugin_environment(folder / "plugins")
    found = doctor("--only", "nixl", "--config", str(path), env=env)

    plugins = found["nixl.plugins"]["values"]["plugins"]
    assert plugins[TWIN] == plugins["UCX"]
    assert plugins["UCX"]["memory_kinds"] == ["DRAM", "VRAM"]
    assert plugins["UCX"]["parameters"]["num_workers"] == "1"
    assert "file too short" in plugins[BROKEN]["problem"]
    assert "UCX (DRAM, VRAM; num_workers=1; " in found["nixl.plugins"]["found"]
    read, broken = found[f"nixl.read.{TWIN}"], found[f"nixl.read.{BROKEN}"]
    assert read["severity"] == "ok"
    assert read["values"]["bytes_per_s"] > 1e8
    assert broken["severity"] == found["nixl.read.POSIX"]["severity"] == "error"
    assert "file too short" in broken["found"]
    assert "is for storage" in found["nixl.read.POSIX"]["found"]
    assert "nixl.read.UCX" not in found
