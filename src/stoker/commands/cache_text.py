"""What ``stoker cache`` says of what it did and found, in words for a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.terminal import human_bytes, human_seconds, table, width

if TYPE_CHECKING:
    from ..staging.prefill import Build
    from ..staging.store.manage import Cache, Pruned, Verified

SHOWN = 10  # samples or files that are named
SHORT = 6  # characters of a cache's key, at least; more where two would be called the same


def stays(build: Build) -> str:
    """What a build leaves that did not end."""
    return (
        f"{build.filled:,} of {build.samples:,} samples are in {build.path} and stay; the next build goes on from there"
    )


def so_far(build: Build) -> str:
    """How far a build is."""
    words = f"{build.done:,} of {build.samples:,} samples ({build.done / build.samples:.0%})"
    words += f", {len(build.failed):,} failed" * bool(build.failed)
    if build.rate and build.done < build.samples:
        left = (build.samples - build.done) / build.rate
        words += f", {build.rate:,.0f} samples/s, about {human_seconds(left)} left"
    return words


def built(build: Build) -> str:
    """What a build did."""
    from ..staging.store.manage import nbytes_of

    lines = []
    if build.failed:
        lines.append(f"{_count(len(build.failed), 'sample')} failed")
        lines += [f"  {f.sample}: {_plain(f.error)}" for f in build.failed[:SHOWN]]
        lines += _more(len(build.failed))
    added = build.filled - build.before
    rate = f", {build.rate:,.0f} samples/s" if added else ", nothing to do" if build.filled == build.samples else ""
    size = human_bytes(nbytes_of(build.path))
    lines.append(f"{build.filled:,} of {build.samples:,} samples in, {size}{rate}: {build.path}")
    return "\n".join(lines)


def listed(base: Path, caches: list[Cache]) -> str:
    """All caches of a folder."""
    if not caches:
        return f"no caches in {base}"
    names = _short([c.path.name for c in caches])
    rows = [
        (
            name,
            f"{c.samples:,}" if c.state == "complete" else f"{c.filled:,}/{c.samples:,}",
            f"{int(100 * c.share)}%",
            human_bytes(c.nbytes),
            _plain(c.made)[:10],
            c.state,
        )
        for name, c in zip(names, caches, strict=True)
    ]
    text = table(("cache", "samples", "in", "on disk", "made", "state"), rows, width(sys.stdout))
    total = human_bytes(sum(c.nbytes for c in caches))
    return f"{text}\n\n{_count(len(caches), 'cache')}, {total}, in {base}"


def _short(names: list[str]) -> list[str]:
    """Names as short as they still are one cache's."""
    out = []
    for name in names:
        n = name.rindex("-") + 1 + SHORT
        while n < len(name) and sum(other.startswith(name[:n]) for other in names) > 1:
            n += 1
        out.append(name[:n])
    return out


def verified(v: Verified) -> str:
    """What a check found."""
    name = v.cache.name
    if v.error:
        return f"{name}: damaged: {_plain(v.error)}" + ": the next run makes it anew" * v.mended
    if not v.damaged:
        if v.cache.state == "refused":
            return f"{name}: nothing in it is used: {_plain(v.cache.reason)}"
        return f"{name}: {_count(v.checked, 'sample')}, all whole"
    which = ", ".join(map(str, v.damaged[:SHOWN])) + ", ..." * (len(v.damaged) > SHOWN)
    then = "let go, and the next run makes them anew" if v.mended else "not served; the folder can only be read"
    return f"{name}: {len(v.damaged):,} of {_count(v.checked, 'sample')} damaged: {which}: {then}"


def pruned(found: Pruned, base: Path, dry: bool) -> str:
    """What was removed, or would be."""
    if not found.removed and not found.nbytes:
        return f"nothing to remove in {base}"
    lines = [f"{c.name}: {human_bytes(c.nbytes)}, {c.state}" for c in found.removed]
    return "\n".join([*lines, f"{human_bytes(found.nbytes)} {'would be freed' if dry else 'freed'}"])


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _more(n: int) -> list[str]:
    return [f"  ... and {n - SHOWN:,} more"] if n > SHOWN else []


def _plain(text: str) -> str:
    """What a file says must not steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
