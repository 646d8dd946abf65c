"""Generated records with a long tail of lengths: doubles, personal data and other languages in the shares of web text."""

import json
import random
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
    "government system better set told nothing night end why find going look point knew program city"
)
ENGLISH = ENGLISH_TEXT.split()
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


def write_corpus(path: Path, records: int, seed: int = 1) -> None:
    """`records` questions with answers as canonical JSON lines; equal seeds give equal files."""
    draw = random.Random(seed)
    last = ""
    with path.open("w", encoding="utf-8") as file:
        for number in range(records):
            if number and number % 20 == 0:  # 5 % are there before
                file.write(last)
                continue
            words = GERMAN if number % 25 == 1 else ENGLISH
            answer = " ".join(draw.choices(words, k=min(4000, 4 + int(draw.lognormvariate(4, 1.1)))))
            if number % 15 == 2:
                answer += " " + PERSONAL[number % len(PERSONAL)].format(number % 250)
            asked = " ".join(draw.choices(words, k=draw.randint(4, 20))) + f" {number}?"
            row = {"answer": answer.capitalize() + ".", "instruction": asked.capitalize()}
            last = json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"
            file.write(last)
