"""What ``stoker cache`` says of what it did and found, in words for a terminal."""

from __future__ import annotations

import shlex
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.terminal import colour_wanted, human_bytes, human_seconds, style, table, width

if TYPE_CHECKING:
    from ..staging.prefill import Build
    from ..staging.store.manage import Cache, Info, Pruned, Verified
    from ..staging.store.sources import Sources

SHOWN = 10  # samples or files that are named
LABEL = 12  # columns
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


def in_full(i: Info) -> str:
    """One cache."""
    c = i.cache
    used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(c.used))
    rows = [
        ("cache", c.name),
        ("in", str(c.path)),
        ("state", f"{c.state}: {c.reason}" if c.reason else c.state),
        ("samples", f"{c.filled:,} of {c.samples:,} ({int(100 * c.share)}%)"),
        ("on disk", f"{human_bytes(c.nbytes)} in {_count(len(i.files), 'file')}; a budget of {human_bytes(c.budget)}"),
        ("made", f"{c.made}, last used {used}"),
    ]
    if i.make:
        rows.append(("a sample", i.make))
        rows.append(("lie in", f"rows, {i.rows:,} of them fit" + f"; others take {human_bytes(i.heap)}" * bool(i.heap)))
    elif c.filled and c.state != "refused":
        rows.append(("lie in", f"one heap, {human_bytes(i.heap)}: their makes or sizes differ"))
    rows += _key(i.key)
    rows += _sources(i.sources)
    colour, columns = colour_wanted(sys.stdout), width(sys.stdout)
    lines, before = [], ""
    for label, words in rows:
        wrapped = textwrap.wrap(
            _plain(words), max(20, columns - LABEL), break_long_words=False, break_on_hyphens=False
        ) or [""]
        lines.append(style(f"{label if label != before else '':<{LABEL}}", "bold", colour) + wrapped[0])
        lines += [" " * LABEL + line for line in wrapped[1:]]
        before = label
    return "\n".join(lines)


def _key(key: dict[str, Any]) -> list[tuple[str, str]]:
    """What a cache depends on, in words."""
    rows = []
    for field, value in key.items():
        if field in ("samples", "sources") or value in ("", {}):
            continue
        if isinstance(value, dict):
            rows.append((field, ", ".join(f"{k} {v}" for k, v in value.items())))
        else:
            rows.append((field, str(value)))
    return rows


def _sources(s: Sources | None) -> list[tuple[str, str]]:
    if s is None:
        return [("sources", "it does not say which files it was made from")]
    same = s.files - len(s.changed) - len(s.gone) - s.unknown
    counts = ((same, "as they were"), (len(s.changed), "changed"), (len(s.gone), "gone"), (s.unknown, "not to be told"))
    words = ", ".join(f"{n:,} {what}" for n, what in counts if n)
    rows = [("sources", f"{_count(s.files, 'file')}: {words}" if s.files else "no files")]
    for paths, what in ((s.changed, "changed"), (s.gone, "gone")):
        rows += [("sources", f"{what}: {shlex.quote(p)}") for p in paths[:SHOWN]]
        rows += [("sources", words.strip()) for words in _more(len(paths))]
    return rows


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
