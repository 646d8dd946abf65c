"""Generate records with long-tailed lengths and words, duplicates, personal data and German text.

Word frequencies follow Zipf's law: 200 words make half of a text, the rest are rare. A small vocabulary would flatter every
tokenizer, and ours most, because it caches words.
"""

import json
import random
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from pathlib import Path

ENGLISH_TEXT = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said what "
    "its about than into them can only other time new some could these two may first then do any like my now over "
    "such our man me even most made after also did many off before must well back through years where much your way "
    "down should because long each just state people those too mister how little good world make very year still "
    "see own work men day get here between both life being under three never know same last another while us might "
    "great old come go since against right came take used himself few house use during without again place around "
    "however home small found thought went say part once general high upon school every does got united left number "
    "course war until always away something fact water though less public put think almost hand enough took far yet "
    "government system better set light nothing night end why find going look point knew program city"
)
STEMS = (
    "act arm art band bank bar base bear bind bird board boat body bone book bound brand break breed bridge bright "
    "broad build burn call camp care cart case cast catch cause cell chain chair change charge chart check chief "
    "child choice claim class clean clear climb clock close cloth cloud coast coat code cold color cook cool copper "
    "corn cost count cover craft cream credit cross crowd crown cruel cry cure cycle dance dark date deal deep design "
    "draw dream dress drink drive dry dust duty earn earth edge effect engine event exact fair faith fall farm fast "
    "field fight file fill film fine fire fish fit flat flow fly fold force forest form frame free fresh fruit gain "
    "gate ghost glass grain grant grass ground group grow guard guess guide harm heat hold honor hope horse hunt ice "
    "iron join judge jump keep kind king knot land law lead leaf lift light limit line link list lock loop mark mass "
    "match measure mill mind mine mix model moon motion mount move music name nerve note offer order pack paint pair "
    "paper pass path pattern phase plan plant plate play pole port post power press price print proof quest rain "
    "range rate reach reason record rest ring river road rock roll root round rule sail salt sand scale score seal "
    "search season seed sense serve shade shape share shift ship shore sign silk silver site skill sleep soil sound "
    "source space spark speed spirit spring stage stand star start steam steel step stock stone store storm stream "
    "stress struct style sugar summer surface sweet table task taste test thread tide tone tool touch town trace "
    "track trade train trap travel treat tribe trust turn type value vein view village voice wall wave wheel wind "
    "winter wire wonder wood word worth yard yield zone"
)
PREFIX_TEXT = "un re over under out fore inter mis pre non co counter trans semi anti de sub super"
SUFFIX_TEXT = "s ed ing er able ness less ful ly ment ish ation ward like"
PREFIXES, SUFFIXES = ("", *PREFIX_TEXT.split()), ("", *SUFFIX_TEXT.split())
GERMAN_TEXT = (
    "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus er hat "
    "dass sie nach wird bei einer um am sind noch wie einem über einen so zum war haben nur oder aber vor zur bis "
    "mehr durch man"
)
GERMAN = GERMAN_TEXT.split()
PERSONAL = (
    "Write to keeper{}@example.com.",
    "Call +49 30 {:07d} today.",
    "The server is 10.1.{}.7.",
    "Pay with 4111 1111 1111 1111, order {}.",
)
SENTENCE = 14
"""Average words per sentence; a new paragraph follows every fourth sentence on average."""


class Shape(StrEnum):
    """The form of records: a question with its answer, or one to four."""

    INSTRUCTION = "instruction"
    MESSAGES = "messages"


class Words:
    """Draws words of a language by Zipf's law."""

    def __init__(self, words: Sequence[str], draw: random.Random) -> None:
        self._words = words
        self._weights = list(accumulate((rank + 2.7) ** -1.15 for rank in range(len(words))))  # Zipf and Mandelbrot
        self._draw = draw

    def some(self, count: int) -> list[str]:
        return self._draw.choices(self._words, cum_weights=self._weights, k=count)

    def text(self, count: int) -> str:
        """Return sentences in paragraphs."""
        parts: list[str] = []
        while count > 0:
            length = min(self._draw.randint(4, 2 * SENTENCE - 4), count)
            count -= length
            words = self.some(length)
            words[length // 2] += "," if length > SENTENCE else ""
            parts += (" ".join(words).capitalize(), ".\n\n" if self._draw.random() < 0.25 else ". ")
        return "".join(parts[:-1]) + "."


def english(draw: random.Random) -> list[str]:
    """Return common words first, then words built from stems, the longest compounds last."""
    rare = [(before, stem, after) for stem in dict.fromkeys(STEMS.split()) for before in PREFIXES for after in SUFFIXES]
    draw.shuffle(rare)
    rare.sort(key=lambda parts: sum(map(bool, parts)))
    return list(dict.fromkeys([*ENGLISH_TEXT.split(), *map("".join, rare)]))


def write_corpus(path: Path, records: int, shape: Shape = Shape.INSTRUCTION) -> None:
    """Write records as canonical JSON lines; the same ones each time."""
    draw = random.Random(1)
    languages = Words(english(draw), draw), Words(GERMAN, draw)
    last = ""
    with path.open("w", encoding="utf-8") as file:
        for number in range(records):
            if number and number % 20 == 0:  # 5 % are duplicates
                file.write(last)
                continue
            words = languages[number % 25 == 1]
            turns = 1 if shape is Shape.INSTRUCTION else draw.randint(1, 4)
            said = [turn(words, draw, turns) for _ in range(turns)]
            if number % 15 == 2:
                said[-1] = (said[-1][0], f"{said[-1][1]} {PERSONAL[number % len(PERSONAL)].format(number % 250)}")
            said[0] = (f"{said[0][0]} {number}?", said[0][1])
            last = json.dumps(row_of(said, shape), ensure_ascii=False, separators=(",", ":"), sort_keys=True) + "\n"
            file.write(last)


def turn(words: Words, draw: random.Random, turns: int) -> tuple[str, str]:
    """Return a question and answer; several in a record share one's length."""
    length = min(4000, 4 + int(draw.lognormvariate(4, 1.1) / turns))
    return " ".join(words.some(draw.randint(4, 20))).capitalize(), words.text(length)


def row_of(said: Sequence[tuple[str, str]], shape: Shape) -> dict[str, object]:
    if shape is Shape.INSTRUCTION:
        return {"instruction": said[0][0], "answer": said[0][1]}
    messages = [
        {"role": role, "content": text} for pair in said for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return {"messages": messages}
