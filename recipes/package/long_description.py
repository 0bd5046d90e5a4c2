"""The project's description on package indices: README.md, with links that work outside of the repository.

setup.cfg names ``EggInfo``, by which setuptools makes the metadata. The address of the repository is ``Source`` in
``project_urls`` of setup.cfg, and nowhere else. If it is set, relative links and pictures become absolute. If it is
not, they could lead nowhere: a link becomes its text, and a picture is left out.

Only setuptools and the standard library are imported, since nothing else is there when a wheel is built.
"""

import re

from setuptools.command.egg_info import egg_info

_CODE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\[\]]*)\]\((?P<target>[^)\s]+)\)")


def portable(markdown: str, repository: str | None) -> str:
    """Markdown of a page at the root of ``repository``, without relative links and pictures.

    Args:
        repository: address of the repository, in whose folders ``blob/HEAD`` and ``raw/HEAD`` are pages and files of
            the newest version; None if it has no address.
    """

    def link(match: re.Match) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:", target):
            return match[0]
        if repository is None:
            return "" if match["picture"] else match["text"]
        path = f"README.md{target}" if target.startswith("#") else target
        kind = "raw" if match["picture"] else "blob"
        return f"{match['picture']}[{match['text']}]({repository.rstrip('/')}/{kind}/HEAD/{path})"

    parts = _CODE.split(markdown)  # every second part is a block of code
    parts[::2] = [re.sub(r"\n{3,}", "\n\n", _LINK.sub(link, text)) for text in parts[::2]]
    return "".join(parts)


class EggInfo(egg_info):
    """setuptools' command that makes the metadata, with the portable description."""

    def finalize_options(self) -> None:
        """Replace the description that setup.cfg reads from README.md."""
        super().finalize_options()
        metadata = self.distribution.metadata
        metadata.long_description = portable(metadata.long_description, (metadata.project_urls or {}).get("Source"))
