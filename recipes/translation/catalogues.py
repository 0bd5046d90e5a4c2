"""Pairs of messages from a machine's message catalogues, FOLDER/LANGUAGE/LC_MESSAGES/PROGRAM.mo, read with gettext."""

import gettext
import re
import struct
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

#: Where Linux systems keep catalogues; the second folder is that of Ubuntu's language packs.
FOLDERS = (Path("/usr/share/locale"), Path("/usr/share/locale-langpack"))
#: The language in which programs are written: a catalogue has its messages next to their translations.
ENGLISH = "en"
#: Fewest and most words, between whitespace, of a message and of its translation.
WORDS = (4, 60)
#: Most bytes of either in UTF-8, normalised as by sentencepiece. A subword has at least one byte, so that with the
#: first space and </s> a text has at most 1,024 subwords, fairseq's default.
BYTES = 1_022
#: Separates a message from its context, such as the menu that it stands in.
_CONTEXT = "\x04"
#: Letters in a row, and places that a program fills in: %s, %-10ld, %(name)s, {0}, <FILE>.
_LETTERS = re.compile(r"[^\W\d_]+")
_FILLED_IN = re.compile(r"%\(\w+\)[a-z]|%[-+#0-9.*$]*(?:hh|ll|[hlzjtqL])?[a-zA-Z]|\{[^{}\s]*\}|<[^<>\s]*>")
#: The key of an entry of a menu, in GTK, Qt and Windows: _Open, E&xit.
_ACCELERATOR = re.compile(r"[_&](?=[^\W\d_])")


class Pair(NamedTuple):
    """A message in two languages."""

    program: str
    source: str
    target: str


class Messages(NamedTuple):
    """The pairs of all catalogues, program by program, and what is not among them."""

    pairs: list[Pair]
    skipped: dict[str, str]  # a catalogue that gettext cannot read -> why
    left_out: dict[str, int]  # why -> messages


def read_catalogue(path: Path) -> dict[str, str]:
    """Message, perhaps after its context -> translation; a message with plural forms has the form for 1.

    Raises:
        ValueError: gettext cannot read it: it is damaged, or not in the character set that it names.
    """
    try:
        with open(path, "rb") as file:
            catalogue = gettext.GNUTranslations(file)
    except (OSError, ValueError, LookupError, struct.error) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    messages = {}
    # gettext has no public list of its messages. Those with plural forms are pairs of a message and a form's number.
    for key in catalogue._catalog:
        message = key if isinstance(key, str) else key[0]
        messages[message] = catalogue.gettext(key) if isinstance(key, str) else catalogue.ngettext(message, message, 1)
    messages.pop("", None)  # the catalogue's own description
    return messages


def find_catalogues(folders: Iterable[Path], language: str) -> dict[str, list[Path]]:
    """Program -> its catalogues of a language, in the order of ``folders``."""
    programs: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted((folder / language / "LC_MESSAGES").glob("*.mo")):
            programs.setdefault(path.stem, []).append(path)
    return dict(sorted(programs.items()))


def read_language(folders: Sequence[Path], language: str, skipped: dict[str, str]) -> dict[str, dict[str, str]]:
    """Program -> message -> translation; ``skipped`` gets the catalogues that cannot be read.

    Raises:
        ValueError: there are no catalogues of the language.
    """
    programs: dict[str, dict[str, str]] = {}
    for program, paths in find_catalogues(folders, language).items():
        for path in paths:
            try:
                programs[program] = {**read_catalogue(path), **programs.get(program, {})}
            except ValueError as error:
                skipped[str(path)] = str(error)
    if not programs:
        raise ValueError(
            f"--folder is {', '.join(map(str, folders))}, without catalogues {language}/LC_MESSAGES/*.mo that can be "
            "read; allowed: a folder that has some. On Debian they come with the programs (apt-get install git gettext "
            f"gnupg-l10n iso-codes libc-l10n), on Ubuntu with language-pack-{language.partition('_')[0]}"
        )
    return programs


def read_messages(folders: Sequence[Path], source: str, target: str) -> Messages:
    """All messages in two languages, cleaned, of ``WORDS`` words and up to ``BYTES`` bytes each, each source once.

    Raises:
        ValueError: the languages are the same, or one has no catalogues.
    """
    if source == target:
        raise ValueError(f"--source and --target are both {source}; allowed: two languages")
    skipped: dict[str, str] = {}
    languages = {
        language: read_language(folders, language, skipped) for language in (source, target) if language != ENGLISH
    }
    pairs: dict[str, Pair] = {}
    left_out = Counter[str]()
    for program in sorted(set.intersection(*map(set, languages.values()))):
        translated = {language: programs[program] for language, programs in languages.items()}
        for message in next(iter(translated.values())):
            english = message.rpartition(_CONTEXT)[2]
            texts = [translated[x].get(message, "") if x in translated else english for x in (source, target)]
            pair = Pair(program, *cleaned(*texts))
            sizes = [len(text.split()) for text in texts]
            longest = max(len(unicodedata.normalize("NFKC", text).encode()) for text in pair[1:])
            if any(of.get(message, "").strip() in ("", english.strip()) for of in translated.values()):
                left_out["not translated"] += 1
            elif not WORDS[0] <= min(sizes) <= max(sizes) <= WORDS[1] or longest > BYTES:
                left_out["too short or too long"] += 1
            elif not words(pair.source):
                left_out["nothing but places to fill in"] += 1
            elif pairs.setdefault(pair.source, pair) is not pair:
                left_out["the same source again"] += 1
    return Messages(list(pairs.values()), skipped, dict(left_out))


def cleaned(source: str, target: str) -> tuple[str, str]:
    """Both texts as one line each, with single spaces and without the keys of menus.

    A `_` or `&` in front of a letter is such a key if both texts have exactly one, in different words. In a name, such
    as pg_dump, the word is the same in both.
    """
    source, target = (" ".join(text.split()) for text in (source, target))
    marked = [[word for word in text.split() if _ACCELERATOR.search(word)] for text in (source, target)]
    if [len(_ACCELERATOR.findall(text)) for text in (source, target)] == [1, 1] and marked[0] != marked[1]:
        source, target = (_ACCELERATOR.sub("", text) for text in (source, target))
    return source, target


def words(text: str) -> frozenset[str]:
    """The words of a message in small letters, without numbers, punctuation and places that a program fills in."""
    return frozenset(_LETTERS.findall(_FILLED_IN.sub(" ", text).casefold()))
