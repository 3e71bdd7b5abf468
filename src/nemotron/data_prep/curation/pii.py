"""Personal data in text: found by patterns, checked where a check digit exists, replaced by placeholders of their type.

    redact("mail jane@corp.net or call +44 20 7946 0018")  ->  "mail [EMAIL] or call [PHONE]"

A pattern only proposes; a check then decides (Luhn, mod 97, ranges, what stands before). What stays, on purpose:

- Addresses that no person can have: e-mail under the reserved names of RFC 2606 and 6761 (`example.com`, `.test`),
  IP addresses that are not globally routable (private, loopback, link-local, and the documentation blocks of RFC 5737
  and 3849), IPv6 outside 2000::/3, the vendors' documented example keys. `keep_reserved=False` replaces them, too.
- Version numbers (`10.0.19041.1`, `version 1.2.3.4`), dates, times, ISBN, order numbers, prices, `logo@2x.png`.
- Names and street addresses: they take a model, not a pattern.

Telephone numbers reserved for fiction (555-01xx) are replaced like any other.

No pattern looks back over what it has read: all repetitions are bounded or possessive, and a run of characters is
entered at its first one only, so that time grows linearly with the text, whatever stands in it.
"""

from __future__ import annotations

import ipaddress
import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from nemotron.data_prep.curation.step import Document, Drop, Keep
from nemotron.kit.schemas.curation import PII_KINDS, PiiSettings


class PersonalData(NamedTuple):
    """One piece of personal data: its type and where it stands, `text[begin:end]`."""

    kind: str
    begin: int
    end: int


# --- E-mail ---------------------------------------------------------------------------------------------------------

_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+'-])[A-Za-z0-9][A-Za-z0-9._%+'-]{0,63}+@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9_-])"
)
_RESERVED_NAMES = ("example", "invalid", "test", "localhost", "local")  # top level; RFC 2606, 6761, 6762
_RESERVED_DOMAINS = re.compile(r"(?:^|\.)example\.(?:com|net|org|edu)$")
_FILE_SUFFIXES = frozenset(
    ["png", "jpg", "jpeg", "gif", "svg", "webp", "ico", "css", "js", "mjs", "ts", "py", "html", "json", "md", "txt"]
)


def _email(match: re.Match[str], keep_reserved: bool) -> bool:
    domain = match[0].rpartition("@")[2].lower()
    top = domain.rpartition(".")[2]
    if top in _FILE_SUFFIXES or ".." in match[0]:
        return False
    return not (keep_reserved and (top in _RESERVED_NAMES or _RESERVED_DOMAINS.search(domain)))


# --- Telephone ------------------------------------------------------------------------------------------------------

_SEPARATOR = r"[ .\-\u00a0\u2011]"
# Not within a word, a decimal or a longer row of groups of digits (a card number, an IBAN).
_APART = r"(?<![\w.+\-/])(?<!\d[ \u00a0])"
_ENDS = r"(?![\w]|[.\-]\d)"
_PHONES = (
    # International, ITU-T E.164: plus or 00, country code, at most 15 digits; "(0)" as often written in Europe.
    re.compile(
        rf"(?<![\w+.])(?:\+|00)[1-9]\d{{0,2}}+(?:{_SEPARATOR}?\(0\))?"
        r"(?:[ .\-/\u00a0]{0,2}(?:\(\d{1,5}\)|\d{1,5}+)){2,6}(?<![ .\-/\u00a0]\d)(?!\d)"
    ),
    # North America: (212) 555-0123, 212-555-0123, 1.212.555.0123; area and exchange begin with 2 to 9.
    re.compile(
        rf"{_APART}(?:1{_SEPARATOR})?(?:\([2-9]\d{{2}}\) ?|[2-9]\d{{2}}{_SEPARATOR})"
        rf"[2-9]\d{{2}}{_SEPARATOR}\d{{4}}{_ENDS}"
    ),
    # With a national prefix 0, in groups: 020 7946 0018, 030/1234567, 01 23 45 67 89, 0412 345 678, 03-1234-5678.
    re.compile(
        rf"{_APART}(?:\(0[1-9]\d{{0,3}}\)|0[1-9]\d{{0,3}})(?:{_SEPARATOR}|/)\d{{2,8}}(?:{_SEPARATOR}\d{{2,8}}){{0,4}}{_ENDS}"
    ),
    # Without a prefix, the area code in brackets: (11) 91234-5678.
    re.compile(rf"{_APART}\(\d{{2,3}}\) ?\d{{3,5}}{_SEPARATOR}\d{{4}}{_ENDS}"),
    # Any digits after a word that announces a number.
    re.compile(
        r"(?i:(?<!\w)(?:tel|telephone|telefon|téléphone|teléfono|phone|mobile|mobil|cell|fax|call|whatsapp|handy)"
        r"(?:\.|:|\s|no\.?|number|us|at|on|me){0,6}[ :]{1,3})(?P<number>\(?\d[\d ().\-/\u00a0]{5,20}\d)(?!\w)"
    ),
)
_DATE = re.compile(
    r"(?:0?[1-9]|[12]\d|3[01])[ .\-/](?:0?[1-9]|1[0-2])[ .\-/](?:19|20)\d\d|(?:19|20)\d\d[ .\-/]\d\d[ .\-/]\d\d"
)


def _phone(number: str) -> bool:
    digits = "".join(filter(str.isdigit, number))
    if number.startswith(("+", "00")):
        return 8 <= len(digits.removeprefix("00")) <= 15
    if _DATE.match(number) or len(set(digits)) == 1:
        return False
    return (9 if digits.startswith("0") else 7) <= len(digits) <= 12


# --- Addresses of machines ------------------------------------------------------------------------------------------

_IPV4 = re.compile(r"(?<![\w.\-])\d{1,3}(?:\.\d{1,3}){3}(?![\w\-]|\.\d)")
_VERSION_BEFORE = re.compile(
    r"(?i:version|release|build|firmware|driver|revision|rev|ver|v|section|sections|chapter|clause|figure|table|§|¶|~=|==|>=|<=)[\s.:]*$"
)
_VERSION_REACH = 16  # characters before
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")


def _ipv4(match: re.Match[str], keep_reserved: bool) -> bool:
    try:
        address = ipaddress.IPv4Address(match[0])  # refuses 256 and leading zeros
    except ValueError:
        return False
    before = match.string[max(0, match.start() - _VERSION_REACH) : match.start()]
    if _VERSION_BEFORE.search(before):
        return False
    return (address.is_global and not address.is_multicast) or not keep_reserved


def _ipv6(match: re.Match[str], keep_reserved: bool) -> bool:
    try:
        address = ipaddress.IPv6Address(match[0])
    except ValueError:  # a time, a MAC address, a row of colons
        return False
    if sum(map(str.isalnum, match[0])) < 3:  # `::`, `a::b`: operators and names in source code
        return False
    return (address.is_global and address in _GLOBAL_UNICAST) or not keep_reserved


# --- Numbers with a check -------------------------------------------------------------------------------------------

_CARD = re.compile(
    r"(?<![\w.\-])(?:\d{4}([ \-]?)\d{4}\1\d{4}\1\d{4}(?:\1\d{1,3})?|\d{4}([ \-]?)\d{6}\2\d{4,5})(?![\w\-]|\.\d)"
)
# Issuer prefixes of ISO/IEC 7812: Visa, Mastercard (51-55 and 2221-2720), Amex, Discover, JCB, Diners, UnionPay.
_ISSUERS = (
    (re.compile(r"4"), (13, 16, 19)),
    (re.compile(r"5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720"), (16,)),
    (re.compile(r"3[47]"), (15,)),
    (re.compile(r"6011|64[4-9]|65"), (16, 19)),
    (re.compile(r"35(?:2[89]|[3-8])"), (16, 17, 18, 19)),
    (re.compile(r"30[0-5]|3[689]"), (14, 16, 19)),
    (re.compile(r"62"), (16, 17, 18, 19)),
)


def luhn(number: str) -> bool:
    """Whether the last digit is the check digit of ISO/IEC 7812-1, annex B. `number`: digits only."""
    total = 0
    for place, digit in enumerate(map(int, reversed(number))):
        total += digit if place % 2 == 0 else sum(divmod(2 * digit, 10))
    return total % 10 == 0


def _card(match: re.Match[str], keep_reserved: bool) -> bool:
    number = "".join(filter(str.isdigit, match[0]))
    known = any(issuer.match(number) and len(number) in lengths for issuer, lengths in _ISSUERS)
    return known and luhn(number)


# Characters of an IBAN by country, from the registry of ISO 13616.
IBAN_LENGTHS = {
    country: length
    for length, countries in {
        15: "NO", 16: "BE", 18: "DK FI FO GL NL", 19: "MK SI", 20: "AT BA EE KZ LT LU XK", 21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA", 23: "AE GI IL IQ TL", 24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "LY PT ST", 26: "IS TR", 27: "FR GR IT MC MR SM", 28: "AL AZ BY CY DO GT HU LB PL SV", 29: "BR EG PS QA UA",
        30: "JO KW MU", 31: "MT SC", 32: "LC",
    }.items()
    for country in countries.split()
}  # fmt: skip
_IBAN = re.compile(
    r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?:[ \u00a0]?[A-Z0-9]{4}){2,7}(?:[ \u00a0]?[A-Z0-9]{1,3})?(?![A-Za-z0-9])"
)


def iban_is_valid(iban: str) -> bool:
    """Length by country and the check digits of ISO 7064 mod 97-10. `iban`: letters and digits only, upper case."""
    if IBAN_LENGTHS.get(iban[:2]) != len(iban):
        return False
    return int("".join(str(int(character, 36)) for character in iban[4:] + iban[:4])) % 97 == 1


def _ibans(text: str) -> Iterator[tuple[int, int]]:
    """A pattern may take in a word in capitals that follows: the country's length says where the IBAN ends."""
    for match in _IBAN.finditer(text):
        length = IBAN_LENGTHS.get(match[0][:2], 0)
        places = [place for place in range(match.start(), match.end()) if text[place].isalnum()]
        if not 0 < length <= len(places):
            continue
        end = places[length - 1] + 1
        whole = length == len(places) or not text[end].isalnum()
        if whole and iban_is_valid("".join(text[place] for place in places[:length])):
            yield match.start(), end


# Areas 000, 666 and 900-999, group 00 and serial 0000 were never given out (Social Security Administration).
_SSN = re.compile(r"(?<![\w.\-])(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\w]|[.\-]\d)")

# --- Secrets --------------------------------------------------------------------------------------------------------

_W = r"[A-Za-z0-9_\-]"
_SECRETS = re.compile(
    r"(?<![A-Za-z0-9_])(?:"
    r"(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS access key id
    r"|gh[pousr]_[A-Za-z0-9]{36,255}+|github_pat_[A-Za-z0-9_]{60,255}+"  # GitHub
    rf"|glpat-{_W}{{20,64}}+"  # GitLab
    r"|xox[abeoprs]-[A-Za-z0-9\-]{10,250}+"  # Slack
    rf"|AIza{_W}{{35}}"  # Google
    r"|[sr]k_(?:live|test)_[A-Za-z0-9]{16,250}+"  # Stripe
    rf"|sk-(?:proj-|svcacct-|admin-|ant-|or-){_W}{{20,250}}+|sk-[A-Za-z0-9]{{32,64}}+"  # OpenAI, Anthropic, OpenRouter
    r"|hf_[A-Za-z0-9]{30,64}+"  # Hugging Face
    rf"|nvapi-{_W}{{40,100}}+"  # NVIDIA
    rf"|npm_[A-Za-z0-9]{{36}}|pypi-{_W}{{50,250}}+"  # package registries
    rf"|SG\.{_W}{{22}}\.{_W}{{43}}"  # SendGrid
    rf"|eyJ{_W}{{10,2000}}+\.eyJ{_W}{{10,4000}}+\.{_W}{{20,2000}}+"  # JSON Web Token
    r")(?![A-Za-z0-9_])"
)
_SECRET_STARTS = (
    "AKIA", "ASIA", "gh", "github_pat_", "glpat-", "xox", "AIza", "k_live_", "k_test_", "sk-", "hf_", "nvapi-", "npm_",
    "pypi-", "SG.", "eyJ",
)  # fmt: skip
_KEY_BEGIN = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_KEY_END = re.compile(r"-----END (?:[A-Z0-9]{1,20} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_KEY_BODY = re.compile(r"(?:\s|[A-Za-z0-9+/=:,\-]{16,}+){0,4000}+")  # of a key that was cut off


def _secret(match: re.Match[str], keep_reserved: bool) -> bool:
    if keep_reserved and "EXAMPLE" in match[0]:  # AWS documents AKIAIOSFODNN7EXAMPLE
        return False
    # Words joined by hyphens have the shape of a key; a key has digits.
    return any(map(str.isdigit, match[0]))


def _private_keys(text: str) -> Iterator[tuple[int, int]]:
    place = 0
    ended = True  # whether an END may still follow
    while begin := _KEY_BEGIN.search(text, place):
        end = _KEY_END.search(text, begin.end()) if ended else None
        ended = end is not None
        body = _KEY_BODY.match(text, begin.end())
        place = end.end() if end else (body.end() if body else begin.end())
        yield begin.start(), place


# --- All of them ----------------------------------------------------------------------------------------------------


def _by_pattern(
    pattern: re.Pattern[str], check: Callable[[re.Match[str], bool], bool] | None, text: str, keep_reserved: bool
) -> Iterator[tuple[int, int]]:
    for match in pattern.finditer(text):
        if check is None or check(match, keep_reserved):
            yield match.span()


def _phones(text: str) -> Iterator[tuple[int, int]]:
    for pattern in _PHONES:
        for match in pattern.finditer(text):
            group = "number" if "number" in pattern.groupindex else 0
            if _phone(match[group]):
                yield match.span(group)


def _spans(kind: str, text: str, keep_reserved: bool) -> Iterable[tuple[int, int]]:
    """Where data of one type stands. The first tests are what must stand in a text at all, and cost little."""
    if kind == "private_key":
        return _private_keys(text) if "PRIVATE KEY" in text else ()
    if kind == "secret":
        likely = any(start in text for start in _SECRET_STARTS)
        return _by_pattern(_SECRETS, _secret, text, keep_reserved) if likely else ()
    if kind == "email":
        return _by_pattern(_EMAIL, _email, text, keep_reserved) if "@" in text else ()
    if kind == "iban":
        return _ibans(text)
    if kind == "credit_card":
        return _by_pattern(_CARD, _card, text, keep_reserved)
    if kind == "ssn":
        return _by_pattern(_SSN, None, text, keep_reserved)
    if kind == "ipv6":
        return _by_pattern(_IPV6, _ipv6, text, keep_reserved) if ":" in text else ()
    if kind == "ipv4":
        return _by_pattern(_IPV4, _ipv4, text, keep_reserved)
    return _phones(text)


# A text with fewer digits has none: most of prose is told apart at once.
_LEAST_DIGITS = {"iban": 6, "credit_card": 14, "ssn": 9, "ipv4": 4, "phone": 7}
PLACEHOLDERS = {kind: f"[{kind.upper()}]" for kind in PII_KINDS} | dict.fromkeys(("ipv6", "ipv4"), "[IP_ADDRESS]")


def find(text: str, kinds: Iterable[str] = PII_KINDS, keep_reserved: bool = True) -> list[PersonalData]:
    """Personal data in a text, in the order in which it stands there; no two overlap.

    Args:
        kinds: which types to look for, of `PII_KINDS`.
        keep_reserved: leave out what no person can have (see above).
    """
    wanted = set(kinds)
    digits = sum(map(text.count, "0123456789"))
    taken: list[tuple[int, int, str]] = []
    for kind in PII_KINDS:
        if kind not in wanted or digits < _LEAST_DIGITS.get(kind, 0):
            continue
        for begin, end in _spans(kind, text, keep_reserved):
            place = bisect_left(taken, (begin, end, ""))
            before_ends = taken[place - 1][1] if place else 0
            next_begins = taken[place][0] if place < len(taken) else len(text)
            if before_ends <= begin and end <= next_begins:
                insort(taken, (begin, end, kind))
    return [PersonalData(kind, begin, end) for begin, end, kind in taken]


def redact(text: str, kinds: Iterable[str] = PII_KINDS, keep_reserved: bool = True) -> tuple[str, Counter[str]]:
    """The text with a placeholder in the place of each piece of personal data, and how many of each type there were."""
    pieces = find(text, kinds, keep_reserved)
    parts, place = [], 0
    for kind, begin, end in pieces:
        parts += [text[place:begin], PLACEHOLDERS[kind]]
        place = end
    return "".join([*parts, text[place:]]), Counter(item.kind for item in pieces)


# --- The step -------------------------------------------------------------------------------------------------------


def judge(document: Document, settings: PiiSettings) -> Keep | Drop:
    """Every document stays; its notes are the types that were replaced in it."""
    text, counts = redact(document["text"], settings.kinds, settings.keep_reserved)
    return Keep(document | {"text": text} if counts else document, tuple(sorted(counts)))
