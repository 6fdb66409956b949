"""Write a software bill of materials: megatrain and every installed package that it needs, as CycloneDX 1.6 JSON.

    python scripts/sbom.py [--extra EXTRA ...] [--output FILE]        in the environment of the release

Versions, licenses and dependencies are those of the installed packages. Format: https://cyclonedx.org/docs/1.6/json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = "megatrain"


def needed(name: str, extras: Sequence[str]) -> tuple[dict[str, Distribution], dict[str, list[str]]]:
    """Return the installed packages that a package needs, itself included, and the names that each of them needs."""
    found: dict[str, Distribution] = {}
    edges: dict[str, list[str]] = {}
    waiting = [(name, tuple(extras))]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        package, wanted = current
        found[package] = distribution(package)
        edges.setdefault(package, [])
        for text in found[package].requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                continue
            other = canonical(requirement.name)
            waiting.append((other, tuple(sorted(requirement.extras))))
            if other != package and other not in edges[package]:
                edges[package].append(other)
    return found, edges


def canonical(name: str) -> str:
    """Return the normalized name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def bill(name: str, extras: Sequence[str]) -> dict[str, Any]:
    """Return the bill of materials of a package."""
    found, edges = needed(name, extras)
    parts = {one: _component(one, package) for one, package in found.items()}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": {**parts[name], "type": "application"},
        },
        "components": [part for one, part in sorted(parts.items()) if one != name],
        "dependencies": [
            {"ref": parts[one]["bom-ref"], "dependsOn": sorted(parts[other]["bom-ref"] for other in others)}
            for one, others in sorted(edges.items())
        ],
    }


def _component(name: str, package: Distribution) -> dict[str, Any]:
    url = f"pkg:pypi/{name}@{package.version}"
    part = {"type": "library", "bom-ref": url, "name": name, "version": package.version, "purl": url}
    expression, free_text = package.metadata.get("License-Expression"), package.metadata.get("License")
    if expression:
        return part | {"licenses": [{"expression": expression}]}
    classifiers = [
        text.split(" :: ")[-1]
        for text in package.metadata.get_all("Classifier") or ()
        if text.startswith("License ::")
    ]
    license_name = classifiers[0] if classifiers else (free_text or "").split("\n")[0]
    return part | ({"licenses": [{"license": {"name": license_name}}]} if license_name else {})


def main(argv: Sequence[str] | None = None) -> int:
    """Write the bill; return the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0], allow_abbrev=False
    )
    parser.add_argument(
        "--extra", nargs="*", default=[], help="optional dependencies to include, such as data, serve"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("dist/sbom.json"), help="file to write (default: dist/sbom.json)"
    )
    arguments = parser.parse_args(argv)
    try:
        content = bill(ROOT, arguments.extra)
    except PackageNotFoundError as error:
        print(
            f"error: the package {error.name} is not installed\n  fix: install it, or leave out its extra",
            file=sys.stderr,
        )
        return 2
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{arguments.output}: {len(content['components'])} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
