"""Pairs of messages from a machine's catalogues, FOLDER/LANGUAGE/LC_MESSAGES/PROGRAM.mo, divided in three parts."""

import gettext
import hashlib
import math
import re
import struct
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
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
#: Two sources that have this share of their words in common are nearly the same.
NEAR = 0.75
SHARES = {"test": 0.05, "valid": 0.05}
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


def read_catalogue(path: Path) -> dict[str, str]:
    """Message, perhaps after its context -> translation; a message with plural forms has the form for 1."""
    with open(path, "rb") as file:
        catalogue = gettext.GNUTranslations(file)
    messages = {}
    # gettext has no public list of its messages. Those with plural forms are pairs of a message and a form's number.
    for key in catalogue._catalog:
        message = key if isinstance(key, str) else key[0]
        messages[message] = catalogue.gettext(key) if isinstance(key, str) else catalogue.ngettext(message, message, 1)
    messages.pop("", None)  # the catalogue's own description
    return messages


def read_language(folders: Sequence[Path], language: str) -> dict[str, dict[str, str]]:
    """Program -> message -> translation; the first of ``folders`` counts. Damaged catalogues are named and left out."""
    programs: dict[str, dict[str, str]] = {}
    for path in (path for folder in folders for path in sorted((folder / language / "LC_MESSAGES").glob("*.mo"))):
        try:
            programs[path.stem] = {**read_catalogue(path), **programs.get(path.stem, {})}
        except (OSError, ValueError, LookupError, struct.error) as error:
            print(f"{path} is left out: {type(error).__name__}: {error}", file=sys.stderr)
    if not programs:
        raise ValueError(
            f"--folder is {', '.join(map(str, folders))}, without catalogues {language}/LC_MESSAGES/*.mo; allowed: a "
            "folder that has some. On Debian they come with the programs (apt-get install git gettext gnupg-l10n "
            f"iso-codes libc-l10n), on Ubuntu with language-pack-{language.partition('_')[0]}"
        )
    return dict(sorted(programs.items()))


def read_messages(folders: Sequence[Path], source: str, target: str) -> tuple[list[Pair], Counter[str]]:
    """All messages in two languages, each source once; and why others are left out -> their number."""
    if source == target:
        raise ValueError(f"--source and --target are both {source}; allowed: two languages")
    languages = {language: read_language(folders, language) for language in (source, target) if language != ENGLISH}
    pairs: dict[str, Pair] = {}
    left_out = Counter[str]()
    for program in sorted(set.intersection(*map(set, languages.values()))):
        translated = {language: programs[program] for language, programs in languages.items()}
        for message in next(iter(translated.values())):
            english = message.rpartition("\x04")[2]  # behind a context, such as the menu that it stands in
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
    return list(pairs.values()), left_out


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


def divide(pairs: Sequence[Pair], seed: int) -> dict[str, list[Pair]]:
    """Train, valid and test: whole programs, and no message of one part is nearly the same in a later one.

    Test and valid get programs while they have at most their ``SHARES``, train gets all others; the order in which
    programs are taken depends on ``seed`` and their names alone.
    """
    sizes = Counter(pair.program for pair in pairs)
    room = {part: share * len(pairs) for part, share in SHARES.items()}
    parts: dict[str, list[Pair]] = {"train": [], "valid": [], "test": []}
    part_of = {}
    for program in sorted(sizes, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest()):
        part_of[program] = next((part for part in room if sizes[program] <= room[part]), "train")
        if part_of[program] in room:
            room[part_of[program]] -= sizes[program]
    for pair in pairs:
        parts[part_of[pair.program]].append(pair)
    parts["valid"] = without_near(parts["valid"], parts["test"])
    parts["train"] = without_near(parts["train"], [*parts["valid"], *parts["test"]])
    if empty := [part for part, chosen in parts.items() if not chosen]:
        raise ValueError(
            f"{len(pairs)} messages of {len(sizes)} programs leave none for {', '.join(empty)}; allowed: catalogues of "
            f"more programs, some with at most {SHARES['test']:.0%} of all messages"
        )
    return parts


def without_near(pairs: Sequence[Pair], others: Sequence[Pair]) -> list[Pair]:
    """The ``pairs`` whose source is not nearly the same as one of ``others``.

    Sets of words x and y are near if |x & y| >= ``NEAR`` |x | y|. Then each has at least one of its |x| - NEAR |x| + 1
    rarest words among those of the other, so that only few sets are compared.
    """
    bags = [words(pair.source) for pair in pairs]
    other_bags = {words(pair.source) for pair in others}
    frequency = Counter(word for bag in (*bags, *other_bags) for word in bag)

    def rarest(bag: frozenset[str]) -> list[str]:
        ordered = sorted(bag, key=lambda word: (frequency[word], word))
        return ordered[: len(bag) - math.ceil(NEAR * len(bag)) + 1]

    having = defaultdict(list)
    for bag in other_bags:
        for word in rarest(bag):
            having[word].append(bag)

    def is_near(bag: frozenset[str]) -> bool:
        candidates = (other for word in rarest(bag) for other in having[word])
        return any(len(bag & other) >= NEAR * len(bag | other) for other in candidates)

    return [pair for pair, bag in zip(pairs, bags) if not is_near(bag)]
