"""The bill of materials of a release names every package that megatrain needs, with version and license."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

SCRIPT = Path(__file__).parents[2] / "scripts" / "sbom.py"


def test_every_needed_package_is_listed(tmp_path: Path) -> None:
    output = tmp_path / "bill.json"
    command = [sys.executable, str(SCRIPT), "--extra", "serve", "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    bill = json.loads(output.read_text(encoding="utf-8"))
    listed = {part["name"]: part for part in bill["components"]}
    direct = [Requirement(text) for text in requires("megatrain") or ()]
    expected = {one.name for one in direct if one.marker is None or one.marker.evaluate({"extra": "serve"})}
    assert {"torch", "uvicorn"} <= expected <= set(listed)
    assert "pytest" not in listed
    for name, part in listed.items():
        assert part["version"] == version(name)
        assert part["licenses"]
        assert part["purl"] == f"pkg:pypi/{name}@{part['version']}"
    edges = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    assert {one for others in edges.values() for one in others} <= set(edges)
    assert listed["torch"]["purl"] in edges[bill["metadata"]["component"]["bom-ref"]]
