"""Personal data: published examples, planted cases, what must stay, and time on hostile text."""

from __future__ import annotations

import ipaddress
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron.data_prep.curation.pii import PLACEHOLDERS, find, iban_is_valid, luhn, redact
from nemotron.kit.schemas.curation import PII_KINDS

from .pii_cases import cases, measure


def kinds_in(text: str) -> list[tuple[str, str]]:
    return [(item.kind, text[item.begin : item.end]) for item in find(text)]


# The issuers' published test numbers, and the examples of the IBAN registry (ISO 13616).
CARDS = ["4111 1111 1111 1111", "5555555555554444", "3782-822463-10005", "6011111111111117", "3530111333300000"]
IBANS = [
    "GB29 NWBK 6016 1331 9268 19",
    "DE89370400440532013000",
    "FR14 2004 1010 0505 0001 3M02 606",
    "NO93 8601 1117 947",
    "CH93 0076 2011 6238 5295 7",
    "MT84 MALT 0110 0001 2345 MTLC AST0 01S",
]


@pytest.mark.parametrize("number", CARDS)
def test_published_card_numbers(number: str) -> None:
    assert luhn("".join(filter(str.isdigit, number)))
    assert kinds_in(f"Card: {number}.") == [("credit_card", number)]
    other = number[:-1] + str((int(number[-1]) + 1) % 10)
    assert ("credit_card", other) not in kinds_in(f"Card: {other}.")


@pytest.mark.parametrize("iban", IBANS)
def test_published_ibans(iban: str) -> None:
    assert kinds_in(f"pay to {iban} TODAY") == [("iban", iban)]
    compact = iban.replace(" ", "")
    swapped = compact[:-2] + compact[-1] + compact[-2]  # mod 97 sees any two digits swapped
    assert iban_is_valid(compact)
    assert swapped == compact or not iban_is_valid(swapped)


@given(st.integers(0, 10**15))
def test_luhn_sees_every_single_wrong_digit(number: int) -> None:
    digits = next(f"{number}{check}" for check in range(10) if luhn(f"{number}{check}"))
    for place in range(len(digits)):
        for digit in "0123456789":
            wrong = digits[:place] + digit + digits[place + 1 :]
            assert luhn(wrong) == (wrong == digits)


@given(st.ip_addresses())
def test_addresses_are_judged_as_the_standard_library_judges_them(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    text = f"from {address.compressed} on"
    public = address.is_global and not address.is_multicast
    if address.version == 6:
        public = public and address in ipaddress.ip_network("2000::/3")
    assert [value for kind, value in kinds_in(text) if kind.startswith("ip")] == [address.compressed] * public


PRECISION, RECALL = 0.98, 0.95  # of every type, on the planted cases


def test_precision_and_recall_on_planted_cases() -> None:
    for seed in (0, 1):
        for kind, score in measure(cases(150, seed)).items():
            assert score.planted == 150
            assert score.found >= RECALL * score.planted, (kind, score)
            assert score.false <= (1 - PRECISION) * score.reported, (kind, score)


@pytest.mark.parametrize(
    "text",
    [
        "Python 3.12.1 and version 1.2.3.4 of the driver, release 10.0.0.1",
        "on 2024-01-15, 15.01.2024 and 01/02/2023 at 12:30:45",
        "ISBN 978-0-306-40615-7, ISBN 0-306-40615-2, DOI 10.1000/182",
        "write to jane@example.com or admin@site.test, see @handle and logo@2x.png",
        "127.0.0.1, 10.1.2.3, 192.168.1.1, 192.0.2.55, 2001:db8::1, ::1, fe80::1",
        "std::vector<int> a::b; x = add::bad",
        "$1,234.56 for 1 000 000 items; 3.14159265358979; +12.5 %; 1e-10",
        "order 1234567, 20240115123000, 550e8400-e29b-41d4-a716-446655440000",
        "The 1990-1999 decade; pages 100-200; 555-1234",
        "sk-learn-is-not-a-key-but-a-library; AKIAIOSFODNN7EXAMPLE",
        "quantize(Decimal('+35236450.6'))",
    ],
)
def test_what_only_looks_like_it_stays(text: str) -> None:
    assert redact(text)[0] == text, kinds_in(text)


def test_reserved_addresses_go_if_asked_for() -> None:
    text = "jane@example.com at 192.168.1.1"
    assert redact(text, keep_reserved=False)[0] == "[EMAIL] at [IP_ADDRESS]"


def test_placeholders_types_and_counts() -> None:
    text = "Ann (ann@corp.net, +44 20 7946 0018) paid 4111 1111 1111 1111 from 8.8.8.8; SSN 123-45-6789."
    redacted, counts = redact(text)
    assert redacted == "Ann ([EMAIL], [PHONE]) paid [CREDIT_CARD] from [IP_ADDRESS]; SSN [SSN]."
    assert counts == {"email": 1, "phone": 1, "credit_card": 1, "ipv4": 1, "ssn": 1}
    assert redact(text, ["email"])[0] == text.replace("ann@corp.net", "[EMAIL]")


def test_a_private_key_goes_whole_even_if_it_was_cut_off() -> None:
    body = "\n".join(["MIIEpAIBAAKCAQEA" * 4] * 5)
    whole = f"before\n-----BEGIN RSA PRIVATE KEY-----\n{body}\n-----END RSA PRIVATE KEY-----\nafter"
    assert redact(whole)[0] == "before\n[PRIVATE_KEY]\nafter"
    cut = f"before\n-----BEGIN PRIVATE KEY-----\n{body}\nThat was it."
    assert redact(cut)[0] == "before\n[PRIVATE_KEY]That was it."


@given(st.text(alphabet="0123456789 .-+()/:@abcdefAK_\nx", max_size=300))
@settings(max_examples=300)
def test_spans_are_in_order_and_each_gets_one_placeholder(text: str) -> None:
    found = find(text)
    assert all(a.end <= b.begin for a, b in pairwise(found))
    assert all(0 <= item.begin < item.end <= len(text) for item in found)
    once, counts = redact(text)
    assert sum(counts.values()) == len(found)
    assert sum(once.count(p) for p in set(PLACEHOLDERS.values())) == len(found)


HOSTILE = [
    "a", "1", "0", " ", ":", ".", "@", "-", "+", "1 ", "1.", "1-", "a@", "a.", "a@a.", "a@a.a@", "0:", "::", "+1 ",
    "+1(2)", "(0", "01 ", "tel ", "tel: ", "tel no. ", "tel 1 ", "4111 ", "411111111111111", "DE89 ", "AA11AAAA",
    "sk-", "sk-proj-a", "eyJ", "eyJaaaaaaaaaa.", "xoxb-1", "gh" + "p_1", "-----BEGIN PRIVATE KEY-----", "-----BEGIN ",
    "-----BEGIN PRIVATE KEY-----\nAAAAAAAAAAAAAAAAAAAA\n", "(212) 555", "212-", "1.2.3.", "v1.2.3.4 ", "me@me.com ",
    "a%+-._", "123-45-", "020 1234 ",
]  # fmt: skip


@pytest.mark.parametrize("unit", HOSTILE)
def test_hostile_text_comes_to_an_end(unit: str) -> None:
    # In linear time that is a tenth of a second. A pattern that looks back over what it has read would take some
    # 5e10 steps, and run into pytest's time limit whatever the machine.
    text = unit * (300_000 // len(unit))
    assert all(0 <= item.begin < item.end <= len(text) for item in find(text))


def test_every_type_has_a_placeholder_that_is_no_data_itself() -> None:
    assert set(PLACEHOLDERS) == set(PII_KINDS)
    assert not find(" ".join(PLACEHOLDERS.values()))
    assert all(re.fullmatch(r"\[[A-Z_]+\]", placeholder) for placeholder in PLACEHOLDERS.values())
