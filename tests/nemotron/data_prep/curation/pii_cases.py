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

from nemotron.data_prep.curation.pii import IBAN_LENGTHS, PLACEHOLDERS, find, luhn
from nemotron.kit.schemas.curation import PII_KINDS

_FIRST = ["anna", "ben", "carla", "dimitri", "elena", "farid", "grace", "hiro", "ines", "jonas", "keiko", "liam"]
_LAST = ["adler", "brown", "costa", "dubois", "eriksen", "fischer", "garcia", "haddad", "ito", "jansen", "kowalski"]
_WORD = ["harbour", "copper", "meadow", "lantern", "granite", "willow", "orchard", "falcon", "ember", "summit", "delta"]
_SENTENCES = (
    "You can reach the office under {} on weekdays.",
    "Contact: {}",
    "The form shows {} in its second line, and nothing else of interest.",
    "({})",
    "Please write it down: {}, then close the window.",
    "name\tvalue\n{}\tfirst entry",
    "According to the log, {} came up twice.",
)
_ALNUM = string.ascii_letters + string.digits
# In a shape: a digit, one of 2 to 9, one of 1 to 9, a letter or digit, the same in capitals, a hexadecimal digit,
# a character of base64 for addresses.
_SYMBOLS = {
    "#": string.digits, "^": "23456789", "*": "123456789", "~": _ALNUM, "!": string.ascii_uppercase + string.digits,
    "=": "0123456789abcdef", ";": _ALNUM + "_-",
}  # fmt: skip
Make = Callable[[random.Random], str]


class Case(NamedTuple):
    """A text with one value in it. `kind`: its type, or None for one that only looks like one."""

    text: str
    value: str
    kind: str | None


class KindScore(NamedTuple):
    """What was planted of a type, what of it was found whole, what was reported, what of that had not been planted."""

    planted: int
    found: int
    reported: int
    false: int


def cases(per_kind: int, seed: int) -> Iterator[Case]:
    """`per_kind` values of every type, and as many of those that only look like one."""
    for kind in PII_KINDS:
        draw = random.Random(f"{seed} {kind}")
        for shapes, is_one in ((_POSITIVE[kind], True), (_NEGATIVE[kind], False)):
            for number in range(per_kind):
                shape = shapes[number % len(shapes)]
                value = _fill(shape, draw) if isinstance(shape, str) else shape(draw)
                # A number alone announces nothing: the cue words of telephone numbers stand in some values themselves.
                yield Case(draw.choice(_SENTENCES).format(value), value, kind if is_one else None)


def measure(some: Iterable[Case]) -> dict[str, KindScore]:
    """Type -> score. A value counts as found if its placeholder takes its place exactly."""
    counts = {kind: [0, 0, 0, 0] for kind in PII_KINDS}
    for case in some:
        if case.kind is not None:
            counts[case.kind][0] += 1
        for item in find(case.text):
            right = item.kind == case.kind and case.text[item.begin : item.end] == case.value
            counts[item.kind][1] += right
            counts[item.kind][2] += 1
            counts[item.kind][3] += not right
    return {kind: KindScore(*values) for kind, values in counts.items()}


# --- Values ---------------------------------------------------------------------------------------------------------


def _fill(shape: str, draw: random.Random) -> str:
    words = {"first": draw.choice(_FIRST), "last": draw.choice(_LAST), "word": draw.choice(_WORD)}
    return "".join(draw.choice(_SYMBOLS[c]) if c in _SYMBOLS else c for c in shape.format(**words))


def _shapes(*lines: str) -> tuple[str, ...]:
    """Shapes, divided by `|` and blanks."""
    return tuple(shape.strip() for line in lines for shape in line.split("|"))


def _card(prefix: str, length: int, groups: tuple[int, ...] = (), separator: str = "", right: bool = True) -> Make:
    def make(draw: random.Random) -> str:
        body = prefix + "".join(draw.choices(string.digits, k=length - len(prefix) - 1))
        check = next(digit for digit in string.digits if luhn(body + digit))
        if not right:
            check = str((int(check) + 1 + draw.randrange(8)) % 10)
        number, parts = body + check, []
        for size in groups:
            parts.append(number[:size])
            number = number[size:]
        return separator.join([*parts, number])

    return make


def _iban(country: str, bank: str, spaced: bool, right: bool = True) -> Make:
    def make(draw: random.Random) -> str:
        account = bank + "".join(draw.choices(string.digits, k=IBAN_LENGTHS[country] - 4 - len(bank)))
        check = 98 - int("".join(str(int(c, 36)) for c in account + country + "00")) % 97
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


def _public_ipv6(form: str) -> Make:
    return lambda draw: str(getattr(ipaddress.IPv6Address((0x2A00 << 112) | draw.getrandbits(108)), form))


def _pem(name: str, lines: int) -> str:
    return "\n".join([f"-----BEGIN {name}-----", *["~" * 30 + "+/" + "~" * 32] * lines, f"-----END {name}-----"])


_POSITIVE: dict[str, tuple[str | Make, ...]] = {
    "email": _shapes(
        "{first}.{last}@{word}-mail.com | {first}19##@{word}.net | {first}_{last}@mail.{word}.co.uk",
        "{first}+news@{word}.io | {last}@{word}.museum | {first}.o'{last}@{word}.ie | INFO@{word}.DE",
    ),
    "phone": _shapes(
        "(^##) ^##-#### | ^##-^##-#### | ^##.^##.#### | 1-^##-^##-#### | +1 ^## ^## #### | +1 (^##) ^##-####",  # US
        "+44 20 #### #### | +44 (0)20 #### #### | 020 7### #### | 07### ######",  # United Kingdom
        "+49 30 *####### | 0049 30 *###### | 030/*###### | 0171 *######",  # Germany
        "+33 6 ## ## ## ## | 01 ## ## ## ## | +34 9## ### ### | +39 06 #### ####",  # France, Spain, Italy
        "+81-3-####-#### | 03-####-#### | +91 9#### ##### | +86 138 #### ####",  # Japan, India, China
        "+61 4## ### ### | 0412 ### ### | (11) 9####-#### | +5511*########",  # Australia, Brazil
    ),
    "ipv4": (_public_ipv4,),
    "ipv6": (_public_ipv6("compressed"), _public_ipv6("exploded"), "2a0*:*===::*=="),
    "credit_card": (
        _card("4", 16, (4, 4, 4), " "), _card("4", 16), _card("53", 16, (4, 4, 4), "-"),
        _card("2221", 16, (4, 4, 4), " "), _card("37", 15, (4, 6), " "), _card("34", 15),
        _card("6011", 16, (4, 4, 4), " "), _card("3530", 16, (4, 4, 4), " "), _card("36", 14, (4, 6), " "),
    ),
    "iban": (
        _iban("DE", "", True), _iban("DE", "", False), _iban("GB", "NWBK", True), _iban("FR", "", True),
        _iban("NO", "", True), _iban("CH", "", False), _iban("NL", "ABNA", True), _iban("MT", "MALT", True),
    ),
    "ssn": _shapes("1^#-4#-^### | 5##-1#-*### | 0#*-*#-#*##"),
    # Taken apart, so that no search for leaked keys stops here.
    "secret": (
        "AK" + "IA#" + "!" * 15, "gh" + "p_#" + "~" * 35, "github" + "_pat_#" + "~" * 40 + "_" + "~" * 40,
        "gl" + "pat-#" + ";" * 19,
        "xo" + "xb-#" + "~" * 24 + "-" + "~" * 24, "AI" + "za#" + ";" * 34, "sk" + "_live_#" + "~" * 23,
        "sk" + "-proj-#" + ";" * 47,
        "sk" + "-#" + "~" * 47, "h" + "f_#" + "~" * 33, "nv" + "api-#" + ";" * 63, "np" + "m_#" + "~" * 35,
        "eyJ#" + ";" * 29 + ".eyJ#" + ";" * 79 + ".#" + ";" * 42,
    ),
    "private_key": tuple(_pem(f"{name}PRIVATE KEY", 5) for name in ("", "RSA ", "OPENSSH ", "EC ")),
}  # fmt: skip

_NEGATIVE: dict[str, tuple[str | Make, ...]] = {
    "email": _shapes(
        "{first}@example.com | {first}@{word}.test | @{first}_{last} | {word}@2x.png | {word}@18.2.0",
        "{first}@localhost | @{word}.setter | {first} @ {word}",
    ),
    "phone": _shapes(
        "2019-0*-1# | 1#.0*.2021 | 1#:3#:2# | ###/##/#### | 1990-19##",
        "978-0-306-4####-# | 0-306-4####-* | *,###,### | $#,###.## | 3.1415#######",
        "RFC 2###, section 4.#.# | *###### | 16########",  # an order number, seconds since 1970
    ),
    "ipv4": _shapes(
        "version #.#.##.# | 10.0.19041.### | v1.#.#.# | section 4.#.2.# | release 2.4.#.1 | 1.2.3.4.5# | 300.1##.#.#",
        "192.168.0.1# | 127.0.0.1 | 192.0.2.1## | 203.0.113.*",
    ),
    "ipv6": _shapes(
        "12:3#:4# | 00:1b:44:11:3a:b# | std::vector | abc::def | 2001:db8::# | fe80::# | ::1 | x[::#]",
    ),
    "credit_card": (
        _card("4", 16, (4, 4, 4), " ", right=False), _card("53", 16, right=False), _card("99", 16, (4, 4, 4), " "),
        _card("4", 15, (4, 6), " "), "97803064####***", "20190*1#123000##",
    ),
    "iban": (
        _iban("DE", "", True, right=False), _iban("GB", "NWBK", False, right=False), "AB12 CDEF 3456 #### ####",
        "EN14 ISO9 0012 ####",
    ),
    "ssn": _shapes(
        "000-1#-*### | 666-1#-*### | 9##-1#-*### | 1##-00-*### | 1##-4#-0000 | SKU 123-45-678*# | 2019-0*-1#",
    ),
    "secret": (
        "sk-{word}-{first}-{last}-{word}-{first}", "AK" + "IAIOSFODNN7EXAMPLE", "hf_{word}", "gh" + "p_{word}",
        "=" * 40, "npm_" + "config_{word}", "eyJ{word}",  # the fifth is a git commit
    ),
    "private_key": (_pem("PUBLIC KEY", 1), _pem("CERTIFICATE", 1), "the PRIVATE KEY of {word}"),
}  # fmt: skip

assert set(_POSITIVE) == set(_NEGATIVE) == set(PLACEHOLDERS)
