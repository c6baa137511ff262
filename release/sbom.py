"""The software bill of materials of stoker's wheel: ``python release/sbom.py > stoker.cdx.json``.

CycloneDX 1.6 (ECMA-424): stoker and what it depends on, without extras, in the versions of the environment that runs
this, which is where the tests ran. What a user gets depends on what pip resolves there; the wheel itself contains
nothing of others.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
EXTRA = re.compile(r";.*\bextra\b")


def requirements(found: Distribution) -> list[str]:
    """Names of what is required without an extra and installed; what another platform would need is not."""
    out = set()
    for line in found.requires or ():
        name = REQUIREMENT.match(line)
        if name and not EXTRA.search(line):
            try:
                out.add(canonical(distribution(name[0]).name))
            except PackageNotFoundError:
                continue  # its marker is false here
    return sorted(out)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(name: str) -> dict[str, Distribution]:
    """A distribution and all that it depends on, by name."""
    out: dict[str, Distribution] = {}
    waiting = [canonical(name)]
    while waiting:
        name = waiting.pop()
        if name not in out:
            out[name] = distribution(name)
            waiting += requirements(out[name])
    return dict(sorted(out.items()))


def purl(found: Distribution) -> str:
    """Its package URL. A local version (``+cpu``) is a build of the release, and no version of its own at PyPI."""
    return f"pkg:pypi/{canonical(found.name)}@{found.version.partition('+')[0]}"


def component(found: Distribution, kind: str = "library") -> dict[str, Any]:
    out: dict[str, Any] = {"type": kind, "bom-ref": purl(found), "name": found.name, "purl": purl(found)}
    out["version"] = found.version.partition("+")[0]
    expression = found.metadata.get("License-Expression")
    if expression:
        out["licenses"] = [{"expression": expression}]
    elif (text := found.metadata.get("License")) and len(text) < 80:  # longer ones are whole licences
        out["licenses"] = [{"license": {"name": text}}]
    return out


def bill(name: str = "stoker") -> dict[str, Any]:
    """The document. It has neither a time nor a serial number, so that the same environment gives the same file."""
    found = closure(name)
    own = found[canonical(name)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(own, "application")},
        "components": [component(each) for each in found.values() if each is not own],
        "dependencies": [
            {"ref": purl(each), "dependsOn": [purl(found[other]) for other in requirements(each)]}
            for each in found.values()
        ],
    }


if __name__ == "__main__":
    json.dump(bill(), sys.stdout, indent=1)
    print()
