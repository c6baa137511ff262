"""All pages that are made from the source, by their path below docs."""

from __future__ import annotations

from . import api, arguments, causes, commands, messages, schema, table, variables

INDEX = {
    "dataloader.md": "The loader: its arguments in groups, its methods.",
    "api.md": "All other public names.",
    "commands.md": "The command line.",
    "causes.md": "What `stoker run` can find, with example scripts.",
    "../report.md": "What the keys of the JSON report mean.",
    "report-schema.md": "Their types.",
    "environment.md": "Environment variables.",
    "messages.md": "Errors and warnings, and what to do.",
    "../versions.md": "Which versions of torch and Python are tested.",
}


def pages() -> dict[str, str]:
    """Text by path; raises ``Uncovered`` where the source has something that no page explains."""
    rows = [[f"[{name.rpartition('/')[2].removesuffix('.md')}]({name})", words] for name, words in INDEX.items()]
    out = {"reference/index.md": f"# Reference\n\nMade from the source.\n\n{table(['page', ''], rows)}"}
    for part in (api, arguments, causes, commands, messages, schema, variables):
        out |= part.page()
    return out
