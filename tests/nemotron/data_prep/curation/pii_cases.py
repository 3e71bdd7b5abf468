"""Made-up personal data in sentences, and what only looks like it: to measure how well `pii.find` does, type by type.

Every value is drawn anew from a seed: telephone numbers in the shapes of a dozen countries, card numbers and IBANs with
right check digits, keys of well-known shapes; against them version numbers, dates, ISBN, order numbers, wrong check
digits, reserved addresses. No value is anybody's.
"""

from __future__ import annotations

import ipaddress
import random
import string
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from nemotron.data_prep.curation.pii import IBAN_LENGTHS, KINDS, PLACEHOLDERS, find, luhn

_FIRST = ("anna", "ben", "carla", "dimitri", "elena", "farid", "grace", "hiro", "ines", "jonas", "keiko", "liam")
_LAST = ("adler", "brown", "costa", "dubois", "eriksen", "fischer", "garcia", "haddad", "ito", "jansen", "kowalski")
_WORD = ("harbour", "copper", "meadow", "lantern", "granite", "willow", "orchard", "falcon", "ember", "summit", "delta")
_SENTENCES = (
    "You can reach the office under {} on weekdays.",
    "Contact: {}",
    "The form shows {} in its second line, and nothing else of interest.",
    "({})",
    "Please write it down: {}, then close the window.",
    "name\tvalue\n{}\tfirst entry",
    "According to the log, {} came up twice.",
)


class Case(NamedTuple):
    """A text with one value in it. `kind`: its type, or None for one that only looks like `looks_like`."""

    text: str
    value: str
    kind: str | None
    looks_like: str


def cases(per_kind: int = 100, seed: int = 0) -> Iterator[Case]:
    """`per_kind` values of every type, and as many of those that only look like one."""
    for kind in KINDS:
        draw = random.Random(f"{seed} {kind}")
        for number in range(per_kind):
            shapes = _POSITIVE[kind]
            value = shapes[number % len(shapes)](draw)
            yield Case(_in_sentence(value, draw), value, kind, kind)
        for number in range(per_kind):
            shapes = _NEGATIVE[kind]
            value = shapes[number % len(shapes)](draw)
            yield Case(_in_sentence(value, draw), value, None, kind)


class KindScore(NamedTuple):
    """What was planted of a type, what of it was found whole, what was reported, what of that had not been planted."""

    planted: int
    found: int
    reported: int
    false: int


def measure(some: Iterable[Case]) -> dict[str, KindScore]:
    """Type -> score. A value counts as found if its placeholder takes its place exactly."""
    counts = {kind: [0, 0, 0, 0] for kind in KINDS}
    for case in some:
        if case.kind is not None:
            counts[case.kind][0] += 1
        for item in find(case.text):
            right = item.kind == case.kind and case.text[item.begin : item.end] == case.value
            counts[item.kind][1] += right
            counts[item.kind][2] += 1
            counts[item.kind][3] += not right
    return {kind: KindScore(*values) for kind, values in counts.items()}


def _in_sentence(value: str, draw: random.Random) -> str:
    # A number alone announces nothing: the cue words of telephone numbers stand in some values themselves.
    return draw.choice(_SENTENCES).format(value)


# --- Values ---------------------------------------------------------------------------------------------------------


def _digits(draw: random.Random, count: int, first: str = string.digits) -> str:
    return draw.choice(first) + "".join(draw.choices(string.digits, k=count - 1))


def _shape(pattern: str) -> Callable[[random.Random], str]:
    """`#`: a digit; `N`: 2 to 9; `X`: 1 to 9; the rest as it is."""

    def make(draw: random.Random) -> str:
        letters = {"#": string.digits, "N": "23456789", "X": "123456789"}
        return "".join(draw.choice(letters[c]) if c in letters else c for c in pattern)

    return make


def _random(alphabet: str, count: int, prefix: str = "") -> Callable[[random.Random], str]:
    return lambda draw: prefix + draw.choice(string.digits) + "".join(draw.choices(alphabet, k=count - 1))


def _person(draw: random.Random, pattern: str) -> str:
    return pattern.format(
        first=draw.choice(_FIRST), last=draw.choice(_LAST), word=draw.choice(_WORD), n=draw.randrange(1950, 2010)
    )


def _mail(pattern: str) -> Callable[[random.Random], str]:
    return lambda draw: _person(draw, pattern)


def _card(
    prefix: str, length: int, groups: tuple[int, ...], separator: str, right: bool = True
) -> Callable[[random.Random], str]:
    def make(draw: random.Random) -> str:
        body = prefix + "".join(draw.choices(string.digits, k=length - len(prefix) - 1))
        check = next(digit for digit in string.digits if luhn(body + digit))
        if not right:
            check = str((int(check) + 1 + draw.randrange(8)) % 10)
        number, parts = body + check, []
        for size in groups:
            parts.append(number[:size])
            number = number[size:]
        return separator.join([*parts, number] if number else parts)

    return make


def _iban(country: str, bank: str, spaced: bool, right: bool = True) -> Callable[[random.Random], str]:
    def make(draw: random.Random) -> str:
        length = IBAN_LENGTHS[country]
        account = bank + "".join(draw.choices(string.digits, k=length - 4 - len(bank)))
        number = int("".join(str(int(c, 36)) for c in account + country + "00"))
        check = 98 - number % 97
        if not right:
            check = 2 + (check - 2 + draw.randrange(1, 97)) % 97
        iban = f"{country}{check:02d}{account}"
        return " ".join(iban[i : i + 4] for i in range(0, len(iban), 4)) if spaced else iban

    return make


def _public_ipv4(draw: random.Random) -> str:
    while True:
        address = ipaddress.IPv4Address(draw.getrandbits(32))
        if address.is_global and not address.is_multicast:
            return str(address)


def _public_ipv6(exploded: bool) -> Callable[[random.Random], str]:
    def make(draw: random.Random) -> str:
        address = ipaddress.IPv6Address((0x2A00 << 112) | draw.getrandbits(108))
        return address.exploded if exploded else address.compressed

    return make


def _short_ipv6(draw: random.Random) -> str:
    return f"2a0{draw.randrange(1, 9)}:{draw.randrange(16**3, 16**4):x}::{draw.randrange(1, 16**4):x}"


def _private_key(name: str) -> Callable[[random.Random], str]:
    def make(draw: random.Random) -> str:
        alphabet = string.ascii_letters + string.digits + "+/"
        lines = ["".join(draw.choices(alphabet, k=64)) for _ in range(draw.randrange(3, 8))]
        return "\n".join([f"-----BEGIN {name}PRIVATE KEY-----", *lines, f"-----END {name}PRIVATE KEY-----"])

    return make


_ALNUM = string.ascii_letters + string.digits
_SAFE = _ALNUM + "_-"

_POSITIVE: dict[str, tuple[Callable[[random.Random], str], ...]] = {
    "email": (
        _mail("{first}.{last}@{word}-mail.com"),
        _mail("{first}{n}@{word}.net"),
        _mail("{first}_{last}@mail.{word}.co.uk"),
        _mail("{first}+news@{word}.io"),
        _mail("{last}@{word}.museum"),
        _mail("{first}.o'{last}@{word}.ie"),
        _mail("INFO@{word}.DE"),
    ),
    "phone": (
        _shape("(N##) N##-####"),  # United States, Canada
        _shape("N##-N##-####"),
        _shape("N##.N##.####"),
        _shape("1-N##-N##-####"),
        _shape("+1 N## N## ####"),
        _shape("+1 (N##) N##-####"),
        _shape("+44 20 #### ####"),  # United Kingdom
        _shape("+44 (0)20 #### ####"),
        _shape("020 7### ####"),
        _shape("07### ######"),
        _shape("+49 30 X#######"),  # Germany
        _shape("0049 30 X######"),
        _shape("030/X######"),
        _shape("0171 X######"),
        _shape("+33 6 ## ## ## ##"),  # France
        _shape("01 ## ## ## ##"),
        _shape("+34 9## ### ###"),  # Spain
        _shape("+39 06 #### ####"),  # Italy
        _shape("+81-3-####-####"),  # Japan
        _shape("03-####-####"),
        _shape("+91 9#### #####"),  # India
        _shape("+61 4## ### ###"),  # Australia
        _shape("0412 ### ###"),
        _shape("(11) 9####-####"),  # Brazil
        _shape("+5511X########"),
        _shape("+86 138 #### ####"),  # China
    ),
    "ipv4": (_public_ipv4,),
    "ipv6": (_public_ipv6(False), _public_ipv6(True), _short_ipv6),
    "credit_card": (
        _card("4", 16, (4, 4, 4), " "),
        _card("4", 16, (), ""),
        _card("53", 16, (4, 4, 4), "-"),
        _card("2221", 16, (4, 4, 4), " "),
        _card("37", 15, (4, 6), " "),
        _card("34", 15, (), ""),
        _card("6011", 16, (4, 4, 4), " "),
        _card("3530", 16, (4, 4, 4), " "),
        _card("36", 14, (4, 6), " "),
    ),
    "iban": (
        _iban("DE", "", True),
        _iban("DE", "", False),
        _iban("GB", "NWBK", True),
        _iban("FR", "", True),
        _iban("NO", "", True),
        _iban("CH", "", False),
        _iban("NL", "ABNA", True),
        _iban("MT", "MALT", True),
    ),
    "ssn": (_shape("1N#-4#-N###"), _shape("5##-1#-X###"), _shape("0#X-X#-#X##")),
    "secret": (
        _random(string.ascii_uppercase + string.digits, 16, "AK" + "IA"),
        _random(_ALNUM, 36, "gh" + "p_"),
        _random(_ALNUM + "_", 82, "github" + "_pat_"),
        _random(_SAFE, 20, "gl" + "pat-"),
        _random(_ALNUM + "-", 50, "xo" + "xb-"),
        _random(_SAFE, 35, "AI" + "za"),
        _random(_ALNUM, 24, "sk" + "_live_"),
        _random(_SAFE, 48, "sk" + "-proj-"),
        _random(_ALNUM, 48, "sk" + "-"),
        _random(_ALNUM, 34, "h" + "f_"),
        _random(_SAFE, 64, "nv" + "api-"),
        _random(_ALNUM, 36, "np" + "m_"),
        lambda draw: ".".join(
            ["eyJ" + _random(_SAFE, 30)(draw), "eyJ" + _random(_SAFE, 80)(draw), _random(_SAFE, 43)(draw)]
        ),
    ),
    "private_key": (_private_key(""), _private_key("RSA "), _private_key("OPENSSH "), _private_key("EC ")),
}

_NEGATIVE: dict[str, tuple[Callable[[random.Random], str], ...]] = {
    "email": (
        _mail("{first}@example.com"),
        _mail("{first}@{word}.test"),
        _mail("@{first}_{last}"),
        _mail("{word}@2x.png"),
        _mail("{word}@18.2.0"),
        _mail("{first}@localhost"),
        _mail("@{word}.setter"),
        _mail("{first} @ {word}"),
    ),
    "phone": (
        _shape("2019-0X-1#"),
        _shape("1#.0X.2021"),
        _shape("1#:3#:2#"),
        _shape("978-0-306-4####-#"),
        _shape("0-306-4####-X"),
        _shape("X,###,###"),
        _shape("$#,###.##"),
        _shape("RFC 2###, section 4.#.#"),
        _shape("3.1415#######"),
        _shape("X######"),  # an order number
        _shape("16########"),  # seconds since 1970
        _shape("###/##/####"),
        _shape("1990-19##"),
    ),
    "ipv4": (
        _shape("version #.#.##.#"),
        _shape("10.0.19041.###"),
        _shape("v1.#.#.#"),
        _shape("section 4.#.2.#"),
        _shape("192.168.0.1#"),
        _shape("127.0.0.1"),
        _shape("192.0.2.1##"),
        _shape("203.0.113.X"),
        _shape("1.2.3.4.5#"),
        _shape("300.1##.#.#"),
        _shape("release 2.4.#.1"),
    ),
    "ipv6": (
        _shape("12:3#:4#"),
        _shape("00:1b:44:11:3a:b#"),
        _shape("std::vector"),
        _shape("abc::def"),
        _shape("2001:db8::#"),
        _shape("fe80::#"),
        _shape("::1"),
        _shape("x[::#]"),
    ),
    "credit_card": (
        _card("4", 16, (4, 4, 4), " ", right=False),
        _card("53", 16, (), "", right=False),
        _card("99", 16, (4, 4, 4), " "),
        _shape("97803064####XXX"),
        _shape("20190X1#123000##"),
        _card("4", 15, (4, 6), " "),
    ),
    "iban": (
        _iban("DE", "", True, right=False),
        _iban("GB", "NWBK", False, right=False),
        _shape("AB12 CDEF 3456 #### ####"),
        _shape("EN14 ISO9 0012 ####"),
    ),
    "ssn": (
        _shape("000-1#-X###"),
        _shape("666-1#-X###"),
        _shape("9##-1#-X###"),
        _shape("1##-00-X###"),
        _shape("1##-4#-0000"),
        _shape("SKU 123-45-678X#"),
        _shape("2019-0X-1#"),
    ),
    "secret": (
        lambda draw: "sk-" + "-".join(draw.choices(_WORD, k=5)),
        lambda draw: "AK" + "IAIOSFODNN7EXAMPLE",
        lambda draw: "hf_" + draw.choice(_WORD),
        lambda draw: "gh" + "p_" + draw.choice(_WORD),
        _random("0123456789abcdef", 40),  # a git commit
        lambda draw: "npm_" + "config_" + draw.choice(_WORD),
        lambda draw: "eyJ" + draw.choice(_WORD),
    ),
    "private_key": (
        lambda draw: "-----BEGIN PUBLIC KEY-----\n" + _random(_ALNUM, 64)(draw) + "\n-----END PUBLIC KEY-----",
        lambda draw: "-----BEGIN CERTIFICATE-----\n" + _random(_ALNUM, 64)(draw) + "\n-----END CERTIFICATE-----",
        lambda draw: f"the PRIVATE KEY of {draw.choice(_WORD)}",
    ),
}

assert set(_POSITIVE) == set(_NEGATIVE) == set(PLACEHOLDERS)
