"""torch's own tests against stoker, from a checkout of torch's source.

    python -m tests.contract.torch_suite pytorch/test/test_dataloader.py

Runs the file three times: as it is, with ``stoker.DataLoader`` in the place of torch's class, and after
``stoker.install()``. What torch's own loader does not pass on this machine need not be passed; every other test must
end alike. Prints the tests that did not, or ``--json``; exit code 1 if there are any, 2 if a run said nothing. The
tests want ``expecttest`` (PyPI). Minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

LOADERS = ("torch", "stoker.DataLoader", "stoker.install()")

if "SUITE_LOADER" in os.environ:  # as pytest's plugin, before it imports the tests
    import torch.utils.data

    import stoker

    if os.environ["SUITE_LOADER"] == "stoker.DataLoader":
        torch.utils.data.DataLoader = torch.utils.data.dataloader.DataLoader = stoker.DataLoader  # type: ignore[misc]
    elif os.environ["SUITE_LOADER"] == "stoker.install()":
        stoker.install()


def outcomes(file: Path, loader: str) -> dict[str, str]:
    """How each test ended: passed, skipped, failure or error. Empty where there was no run."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (root, root / "src")))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            os.devnull,
            "--rootdir",
            str(file.parent),
            "-p",
            __spec__.name,
        ]
        words += ["-p", "no:cacheprovider", "--timeout", "200", f"--junitxml={report}", str(file)]
        env = {**os.environ, "SUITE_LOADER": loader, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        p = subprocess.run(words, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        cases = ET.parse(report).iter("testcase") if report.exists() else ()
        out = {f"{c.get('classname')}.{c.get('name')}": next((k.tag for k in c), "passed") for c in cases}
    print(f"{loader}: {(p.stdout.strip().splitlines() or ['nothing'])[-1]}", file=sys.stderr)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a file of torch's tests")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    if not a.file.is_file():
        parser.error(f"{a.file}: no such file")
    ends: dict[str, dict[str, str]] = {}
    for loader in LOADERS:
        ends[loader] = outcomes(a.file.resolve(), loader)
        if not ends[loader]:
            print(f"{a.file}: no test ran; torch's own want expecttest: pip install expecttest", file=sys.stderr)
            return 2
    names = sorted({name for end in ends.values() for name in end})
    rows = {name: [ends[loader].get(name, "absent") for loader in LOADERS] for name in names}
    other = {name: dict(zip(LOADERS, row, strict=True)) for name, row in rows.items() if len(set(row)) > 1}
    worse = {name for name in other if rows[name][0] == "passed"}
    if a.json:
        print(json.dumps({"tests": len(names), "other": other, "worse": sorted(worse)}))
    else:
        for name, row in other.items():
            print(f"{name}: {', '.join(f'{k} {v}' for k, v in row.items())}")
        print(f"{len(names)} tests, {len(other)} end in another way, {len(worse)} of them pass with torch's loader")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
