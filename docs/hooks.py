"""Hook of the documentation site: links to files outside docs/ become the names of those files.

On a code host these links lead to the files; the site holds only the documentation.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>(?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links that leave docs/ by their text and the path from the repository's root."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, link["target"]))
        if path.startswith("docs/"):
            return link[0]
        text = link["text"].strip("`")
        return f"`{path}`" if text in (path, posixpath.basename(path)) else f"{link['text']} (`{path}`)"

    return _LINK.sub(replace, markdown)
