"""The pages that ship with the package: symptoms, and guides for tasks and frameworks.

``docs/symptoms`` has one Markdown file per symptom. ``symptoms`` and ``guides`` beside this module are links to what is
in ``docs``, so the site and ``stoker explain`` show the same text. A page about a symptom begins with a head::

    ---
    title: The first epoch is slow
    words: cold cache nfs s3      search terms beyond those in the title
    causes: cold_cache            the doctor's causes that the page explains, separated by commas; may be empty
    ---
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE / "symptoms"
GUIDES = HERE / "guides"
INDEX = "index"  # the page that lists the others
NO_TEXT = re.compile(r"<!--.*?-->\n?|^``` \{ \.python \}\n--8<--.*?\n```$", re.DOTALL | re.MULTILINE)
MAX_SENTENCES = 3  # of a guide, as an answer


@dataclass(frozen=True)
class Page:
    """One page. ``name`` is the stem of a symptom's file, or ``docs/...md`` of a guide; ``text`` is the Markdown
    without head and title."""

    name: str
    title: str
    words: str
    causes: tuple[str, ...]
    text: str

    @property
    def path(self) -> str:
        return self.name if self.is_guide else f"docs/symptoms/{self.name}.md"

    @property
    def is_guide(self) -> bool:
        return self.name.endswith(".md")

    @property
    def means(self) -> str:
        """What the reader sees, or what a guide is about; at most three sentences, as plain text."""
        return self._part("What it looks like.") if not self.is_guide else _first_sentences(self.text)

    @property
    def remedy(self) -> str:
        """What to do, with stoker; empty for a guide."""
        return self._part("With stoker.") if not self.is_guide else ""

    @property
    def command(self) -> str:
        """The first command of a guide, empty if it has none; or the one that a symptom's remedy names."""
        if self.is_guide:
            found = re.search(r"(?m)^(?:    |\$ )(stoker .*?|%load_ext stoker)(?:  +#.*)?$", self.text)
            return found[1] if found else ""
        found = re.search(r"`(stoker [\w-]+ [^`]+)`", self._section("With stoker."))
        return found[1] if found else "stoker run train.py"

    def _section(self, name: str) -> str:
        found = re.search(rf"\*\*{re.escape(name)}\*\*(.*?)(?=\n\n\*\*|\Z)", self.text, re.DOTALL)
        return found[1].strip() if found else ""

    def _part(self, name: str) -> str:
        return plain(re.split(r"\n\n+(?=    |```)", self._section(name))[0])


@functools.cache
def symptoms() -> tuple[Page, ...]:
    found = (_symptom(path) for path in FOLDER.glob("*.md") if path.stem != INDEX)
    return tuple(sorted(found, key=lambda page: page.title.lower()))


@functools.cache
def guides() -> tuple[Page, ...]:
    paths = sorted({*GUIDES.glob("*.md"), *GUIDES.glob("*/*.md")})
    return tuple(_guide(path) for path in paths if path.stem != INDEX)


def _symptom(path: Path) -> Page:
    _, head, text = path.read_text("utf-8").split("---\n", 2)
    entries = dict(re.findall(r"(?m)^(\w+):[ ]?(.*)$", head))
    causes = entries["causes"].replace(",", " ").split()
    return Page(path.stem, entries["title"], entries["words"], tuple(causes), text.strip())


def _guide(path: Path) -> Page:
    """Parses a guide, whose title is its first line. Its search terms are its headings, and the comment
    ``<!-- words: ... -->`` if it has one."""
    source, name = path.read_text("utf-8"), f"docs/{path.relative_to(GUIDES).as_posix()}"
    title, _, text = NO_TEXT.sub("", source).strip().partition("\n")
    words = [*re.findall(r"(?m)^##+ (.+)$", text), *re.findall(r"<!-- words: (.*?) -->", source)]
    return Page(name, title.strip("# "), " ".join(words), (), text.strip("\n"))


def plain(markdown: str) -> str:
    """Returns prose without marks and links; of a link to another symptom, the command that shows it is kept."""
    text = re.sub(r"\s*\(\[[^]]*\]\([^)]*\)\)", "", markdown)
    text = re.sub(r"\[([^]]*)\]\(([\w-]+)\.md\)", r"\1 (stoker explain \2)", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\s+", " ", re.sub(r"[`*]", "", text)).strip()


def _first_sentences(text: str) -> str:
    """Returns the first sentences of a guide that are prose; the command above them if they continue it."""
    command = ""
    for block in re.split(r"\n\n+", re.sub(r"(?ms)^```.*?^```$", "", text)):
        words = block.strip()
        if block.startswith("    "):
            command = words.split("\n")[0].split("  #")[0].strip()
        elif words[:1] not in ("#", "|", "<", "") and not re.match(r"([Oo]r|and)\b|!\[", words):
            item = re.split(r"\n- ", re.sub(r"^[-\d.]+ ", "", words))[0]
            sentences = re.split(r"(?<=[.!?])\s+", plain(item).removesuffix(":"))[:MAX_SENTENCES]
            begin = f"{command} " if command and words[0].islower() else ""
            return re.sub(r"([^.!?])$", r"\1.", begin + " ".join(sentences))
    return ""
