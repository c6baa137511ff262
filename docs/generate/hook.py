"""What mkdocs calls: brings in the generated pages, and files outside of docs that pages link to."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from docs.generate import reference  # noqa: E402

BENCHMARKS = "benchmarks.md"  # the page of benchmarks/README.md
BOOST = {"symptoms/": 2, "notes/": 0.1}  # in the search: people type what they see, few look for measurements
LINK = re.compile(r"(\[[^\]]*\])\(([^)#\s]+)((?:#[^)\s]*)?\))")
COPIES = "repository"  # where other files of the repository lie in the site


def on_config(config: Any) -> Any:
    """Spells out the folders of the navigation, and ``"*"``."""
    docs = Path(config.docs_dir)
    named = {name for name in _names(config.nav) if name.endswith(".md")}
    rest = sorted(p.name for p in docs.glob("*.md") if p.name not in named)
    config.nav = _spelled(config.nav, docs, rest)
    return config


def _names(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [name for part in (nav.values() if isinstance(nav, dict) else nav) for name in _names(part)]


def _spelled(nav: list[Any], docs: Path, rest: list[str]) -> list[Any]:
    out: list[Any] = []
    for entry in nav:
        if entry == "*":
            out += rest
        elif isinstance(entry, dict):
            ((title, part),) = entry.items()
            if isinstance(part, str) and part.endswith("/"):
                pages = sorted((docs / part).glob("*.md"), key=lambda p: (p.name != "index.md", p.name))
                if pages:  # a folder that is not there yet is left out
                    out.append({title: [part + p.name for p in pages]})
            else:
                out.append({title: _spelled(part, docs, rest) if isinstance(part, list) else part})
        else:
            out.append(entry)
    return out


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages, benchmarks/README.md, and the files that pages link to outside of docs."""
    for path, text in reference.pages().items():
        files.append(File.generated(config, path, content=text))
    readme = ROOT / "benchmarks" / "README.md"
    sources = {BENCHMARKS: (readme.read_text(), readme.parent)}
    sources |= {f.src_uri: (Path(f.abs_src_path).read_text(), Path(f.abs_src_path).parent)
                for f in files if f.is_documentation_page() and f.generated_by is None and f.abs_src_path}  # fmt: skip
    for uri, (text, folder) in sources.items():
        for link in _links(text):
            target = _at(folder / link)
            if _outside(target) and target.is_file() and target != readme:
                path = f"{COPIES}/{target.relative_to(ROOT)}"
                if files.get_file_from_path(path) is None:
                    files.append(File.generated(config, path, abs_src_path=str(target)))
        if uri == BENCHMARKS:
            files.append(File.generated(config, uri, content=text))
    return files


def _at(path: Path) -> Path:
    """Without ``..``; symbolic links stay, because docs may hold some."""
    return Path(os.path.normpath(path))


def _links(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]


def _outside(target: Path) -> bool:
    return not target.is_relative_to(DOCS) and target.is_relative_to(ROOT)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points links at where their targets lie in the site; what does not lie there is no link."""
    uri = page.file.src_uri
    folder = _origin(uri)
    up = "../" * uri.count("/")

    def moved(found: re.Match[str]) -> str:
        text, link, end = found[1], found[2], found[3]
        target = _at(folder / link)
        if "://" in link or not target.is_relative_to(ROOT):
            return found[0]
        if target == ROOT / "benchmarks" / "README.md":
            return f"{text}({up}{BENCHMARKS}{end}"
        if target.is_relative_to(DOCS):
            return found[0] if folder.is_relative_to(DOCS) else f"{text}({up}{target.relative_to(DOCS)}{end}"
        path = f"{COPIES}/{target.relative_to(ROOT)}"
        if files.get_file_from_path(path) is not None:
            return f"{text}({up}{path}{end}"
        return text.strip("[]")

    page.meta.setdefault("search", {"boost": next((n for part, n in BOOST.items() if uri.startswith(part)), 1)})
    return LINK.sub(moved, markdown)


def _origin(uri: str) -> Path:
    """The folder of the file that a page is made of."""
    if uri == BENCHMARKS:
        return ROOT / "benchmarks"
    if uri.startswith(f"{COPIES}/"):
        return (ROOT / uri.removeprefix(f"{COPIES}/")).parent
    return (DOCS / uri).parent


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The search's script comes from the site itself."""
    up = "../" * page.file.src_uri.count("/")
    return output.replace('src="https://unpkg.com/iframe-worker/shim"', f'src="{up}search.js"')


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """The same for the page of what is not found, whose links begin at the root."""
    return output.replace('src="https://unpkg.com/iframe-worker/shim"', 'src="/search.js"')
