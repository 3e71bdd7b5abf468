"""What the pages of a made-up crawl say: explanations from the standard library, and sentences put together from lists.

Everything is drawn from a `random.Random`, so that the same seed gives the same text. Three pools of English: what
explains something (paragraphs of docstrings), what tells of everyday things, and what only wants to be clicked on. Six
other languages have sentences of their own.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

from nemotron.data_prep.sources import stdlib

_LIST = re.compile(r"\[(\w+)\]")


def explanations(random: Random) -> list[str]:
    """Paragraphs of prose from the standard library's docstrings, each once, in random order."""
    paragraphs = list(_paragraphs())
    random.shuffle(paragraphs)
    return paragraphs


@cache
def _paragraphs() -> tuple[str, ...]:
    found: dict[str, None] = {}
    for document in stdlib.prose_documents(stdlib.module_files(), 1_000_000, "stdlib"):
        for paragraph in re.split(r"\n\s*\n", document["text"]):
            flat = " ".join(paragraph.split())
            letters = sum(character.isalpha() or character == " " for character in flat)
            is_prose = len(flat.split()) >= 18 and letters >= 0.86 * len(flat) and flat[-1] in ".!?:"
            if is_prose and ">>>" not in flat and "@" not in flat and not re.search(r"\d{3}", flat):
                found[flat] = None
    return tuple(found)


# --- Sentences from lists ---------------------------------------------------------------------------------------------

LISTS = Path(__file__).with_suffix(".yaml")
_TEXTS: dict[str, Any] = yaml.safe_load(LISTS.read_text(encoding="utf-8"))
_EVERYDAY, _CLICKBAIT, _OTHER = _TEXTS["everyday"], _TEXTS["clickbait"], _TEXTS["other"]
LANGUAGES = tuple(_OTHER)


def everyday(random: Random, num_sentences: int) -> str:
    """A paragraph of plain English."""
    return _sentences(_EVERYDAY, random, num_sentences)


def clickbait(random: Random, num_sentences: int) -> str:
    """A paragraph of English that only wants to be clicked on."""
    return _sentences(_CLICKBAIT, random, num_sentences)


def foreign(language: str, random: Random, num_sentences: int) -> str:
    """A paragraph in one of LANGUAGES."""
    return _sentences(_OTHER[language], random, num_sentences)


def title(random: Random, language: str = "en") -> str:
    """A headline of a few words."""
    if language == "en":
        thing, place = random.choice(_EVERYDAY["thing"]), random.choice(_EVERYDAY["place"])
        return f"{thing} {place}".capitalize()
    return _sentences(_OTHER[language], random, 1).split(",")[0].rstrip(".")


def _sentences(lists: dict[str, list[str]], random: Random, count: int) -> str:
    def choose(match: re.Match[str]) -> str:
        name = match[1]
        chosen = random.choice(lists[name.lower()])
        return chosen[0].upper() + chosen[1:] if name[0].isupper() else chosen

    sentences = [_LIST.sub(choose, random.choice(lists["sentence"])) for _ in range(count)]
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


# --- Passages that many pages share -----------------------------------------------------------------------------------

BOILERPLATE: tuple[str, ...] = tuple(_TEXTS["boilerplate"])
"""Passages of some 70 words each."""

# --- Personal data ----------------------------------------------------------------------------------------------------

_FIRST = ["anna", "boris", "carla", "david", "elena", "frank", "greta", "henri", "ines", "jonas", "karim", "lena"]
_LAST = ["abel", "bauer", "castro", "dubois", "ekberg", "fischer", "garcia", "holm", "ivanov", "jansen", "kowalski"]
_DOMAINS = ["norwick-mail.net", "kanalpost.de", "bluequay.org", "maison-verte.fr", "tidewater.co.uk", "sunroof.io"]
_FRAMES = {
    "email": ["You can write to {} about it.", "Questions go to {} before Friday."],
    "phone": ["Call {} after six.", "Their number is {}, ask for the cook."],
    "ip": ["The request came from {} at night.", "According to the log, {} asked for the page twice."],
    "credit_card": ["The form still showed the card {} in full.", "She paid with card {} at the counter."],
    "ssn": ["His social security number, {}, was on the envelope.", "The file lists SSN {} for the tenant."],
    "iban": ["Please transfer the deposit to {} by Monday.", "The account {} belongs to the choir."],
}
_HARD_FRAMES = {
    "email": ["The decorator {} stands above the method.", "We meet {} by the gate."],
    "phone": ["The book has the number ISBN {} on its back.", "Part {} fits both pumps."],
    "ip": ["The update to version {} took an hour.", "Section {} of the manual explains it."],
    "credit_card": ["The serial number {} is engraved below.", "Tracking number {} was never found."],
    "ssn": ["The shelf mark {} is no longer in use.", "Form {} has to be filled in twice."],
    "iban": ["The engine code {} is stamped on the block.", "Catalogue entry {} was sold."],
}
PII_TYPES = tuple(_FRAMES)


def personal(kind: str, random: Random, *, hard_negative: bool) -> tuple[str, str]:
    """A sentence with a piece of personal data of one of PII_TYPES, and the piece itself.

    `hard_negative`: it only looks like one: a decorator, an ISBN, a version with a part above 255, a number whose check
    digits are wrong, one that was never given out as a social security number.
    """
    value = _lookalike(kind, random) if hard_negative else _piece(kind, random)
    return random.choice((_HARD_FRAMES if hard_negative else _FRAMES)[kind]).format(value), value


def _piece(kind: str, random: Random) -> str:
    def digits(count: int) -> str:
        return "".join(random.choice("0123456789") for _ in range(count))

    match kind:
        case "email":
            dot = random.choice([".", "_", "-", ""])
            return (
                f"{random.choice(_FIRST)}{dot}{random.choice(_LAST)}{random.randrange(100)}@{random.choice(_DOMAINS)}"
            )
        case "phone":
            area, number = random.randrange(201, 990), digits(4)
            exchange = random.randrange(200, 999)
            return random.choice(
                [f"({area}) {exchange}-{number}", f"+1 {area} {exchange} {number}", f"{area}-{exchange}-{number}"]
            )
        case "ip":
            parts = [random.randrange(11, 223), *(random.randrange(1, 255) for _ in range(3))]
            return ".".join(map(str, parts))
        case "credit_card":
            body = f"4{digits(14)}"
            number = body + next(digit for digit in "0123456789" if luhn_holds(body + digit))
            return random.choice([" ", "-"]).join(number[i : i + 4] for i in range(0, 16, 4))
        case "ssn":
            return f"{random.randrange(101, 600)}-{random.randrange(10, 99)}-{random.randrange(1000, 9999)}"
        case "iban":
            return _iban(digits(18))
    raise ValueError(kind)


def _lookalike(kind: str, random: Random) -> str:
    match kind:
        case "email":
            return random.choice(["@functools.cache", "@property", "@9.30", "@noon"])
        case "phone":
            return random.choice(["978-3-16-148410-0", "978-0-306-40615-7", "77-1042-9-B", "4411-20-7/3"])
        case "ip":
            return (
                f"{random.randrange(1, 20)}.{random.randrange(256, 900)}.{random.randrange(10)}.{random.randrange(9)}"
            )
        case "credit_card":
            number = _piece(kind, random)
            return number[:-1] + str((int(number[-1]) + random.randrange(1, 10)) % 10)  # Luhn's sum fails
        case "ssn":
            area = random.choice(["000", "666"])  # no number has ever begun so
            return f"{area}-{random.randrange(10, 99)}-{random.randrange(1000, 9999)}"
        case "iban":
            number = _piece(kind, random)
            return number[:-1] + str((int(number[-1]) + random.randrange(1, 10)) % 10)  # the remainder is not 1
    raise ValueError(kind)


def luhn_holds(number: str) -> bool:
    """Whether the last digit of a card number is its check digit (ISO/IEC 7812-1, annex B)."""
    values = [int(digit) for digit in reversed(number)]
    return (sum(values[::2]) + sum(sum(divmod(2 * value, 10)) for value in values[1::2])) % 10 == 0


def _iban(account: str) -> str:
    """A German IBAN for an account of 18 digits, check digits by ISO 13616 (D = 13, E = 14)."""
    check = 98 - int(f"{account}131400") % 97
    plain = f"DE{check:02d}{account}"
    return " ".join(plain[i : i + 4] for i in range(0, len(plain), 4))


# --- Pages that are worth nothing -------------------------------------------------------------------------------------

LOW_QUALITY = ("keyword_list", "spam", "symbol_soup", "repeated_lines", "placeholder", "stub")
_FILLER = ["lorem", "ipsum", "dolor", "sit", "amet", "consectetur", "adipiscing", "elit", "sed", "tempor", "magna"]


def low_quality(kind: str, random: Random) -> list[str]:
    """The paragraphs of a page of one of LOW_QUALITY."""
    match kind:
        case "keyword_list":
            words = [word for name in ("goods", "goods2", "deal") for word in _CLICKBAIT[name]]
            return [", ".join(random.choice(words) for _ in range(40)) for _ in range(4)]
        case "spam":
            shop = f"best {random.choice(_CLICKBAIT['goods'])} {random.choice(_CLICKBAIT['goods2'])}"
            return [
                f"{shop}!!! $$$ {random.randrange(10, 99)}% OFF $$$ {shop}!!! >>> CLICK HERE <<< {shop} {shop}!!!"
            ] * 2 + [
                f"{shop.upper()} >>> {random.randrange(1000, 9999)} HAPPY CUSTOMERS!!! $$$ {shop.upper()} $$$"
                for _ in range(4)
            ]
        case "symbol_soup":
            return [
                " ".join("".join(random.choice("#$%&*+/=?^_~|{}[]0123456789") for _ in range(8)) for _ in range(18))
                for _ in range(5)
            ]
        case "repeated_lines":
            line = everyday(random, 1)  # within paragraphs: equal lines are taken out by many an extractor
            return [f"{number}. {line} {line} {line}" for number in range(1, 7)]
        case "placeholder":
            return [
                " ".join([random.choice(_FILLER).capitalize(), *(random.choice(_FILLER) for _ in range(40))]) + "."
                for _ in range(3)
            ]
        case "stub":
            return [
                f"This page about {random.choice(_EVERYDAY['thing'])} has not been written yet. Please come back later."
            ]
    raise ValueError(kind)


# --- Evaluation sets --------------------------------------------------------------------------------------------------


def evaluation_sets(random: Random, size: int = 40) -> dict[str, list[dict[str, str]]]:
    """Two small sets of questions with answers, `{"id", "question", "answer"}`; nothing else says the same."""
    sums, riddles = [], []
    for number in range(size):
        who, thing, place = (random.choice(_EVERYDAY[name]) for name in ("who", "thing", "place"))
        first, second = random.randrange(12, 99), random.randrange(12, 99)
        question = (
            f"In the morning {who} puts {first} marbles beside {thing}, in the evening {second} more arrive {place}, "
            "and nobody takes any away. How many marbles are there at midnight?"
        )
        sums.append({"id": f"sums-{number}", "question": question, "answer": f"There are {first + second} marbles."})
        old, middle, young = random.sample(_EVERYDAY["who"], 3)
        thing, place = random.choice(_EVERYDAY["thing"]), random.choice(_EVERYDAY["place"])
        question = (
            f"{old.capitalize()} is older than {middle}, who in turn is older than {young}, and the youngest of the "
            f"three owns {thing} {place}. Whose is it?"
        )
        riddles.append({"id": f"riddles-{number}", "question": question, "answer": f"It belongs to {young}."})
    return {"sums": sums, "riddles": riddles}
