"""mkdocs: the documents are read in the tree, too, where they link to files outside docs/. On the
site those links become the files' names."""

import re


def on_page_markdown(markdown, **_):
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2`)", markdown)
