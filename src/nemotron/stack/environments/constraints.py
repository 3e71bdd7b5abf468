"""Constraints on the text of an answer that a program can check, by the identifiers of IFEval and NeMo Gym.

An identifier such as `length_constraints:number_words` and its arguments (`{"num_words": 10, "relation": "at least"}`)
are what published records of instruction following hold. Each constraint is a plain function of the text and those
arguments: True if the text follows it. An unknown identifier, and arguments that are missing, unknown or make no sense,
raise: a broken record is not an answer that is wrong.

The definitions are those of IFEval (Zhou et al. 2023, arXiv 2311.07911) and of the set that NeMo Gym's environment
`instruction_following` checks. Where a check there lets through what its instruction forbids, it is mended here:

- A keyword is text, not a regular expression, and stands where a word begins with it: `yields` has `yield`,
  `yieldhaven` has no `haven`.
- Full-width and other forms of a comma, full stop or exclamation mark are such marks, and a word or letter
  that is forbidden or counted is still that one with invisible characters in it.
- JSON has no NaN. A palindrome has three letters. An option is chosen when no other one is named beside it.
- An empty text, and one of invisible characters, follows nothing (as in IFEval).

Sentences end at `.`, `!` or `?` before a blank, abbreviations aside; Gym's set takes NLTK's for one constraint and a
splitter of its own for the others. The language of a text is py3langid's guess (extra `curation`), Gym's langdetect's.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from nemotron.kit.language import check_language, classify
from nemotron.stack.environments.formats import refuse_constant

_COMMAS, _FULL_STOPS, _EXCLAMATIONS = ",\u060c\u3001", ".\u3002", "!\u00a1"
_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Inc|Ltd|Co|vs|etc|e\.g|i\.e|Ph\.D)|\b[A-Z])\.$")
# From the first mark on, and without going back: else a row of dots takes quadratic time.
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'\u201d\u2019)\]]*+(?=\s)")
# Of a shorter text, the guess of its language is noise.
_LETTERS_TO_TELL = 30


def follows(constraint: str, arguments: dict[str, Any] | None, text: str) -> bool:
    """Whether `text` follows one constraint; arguments that are null count as absent.

    Raises:
        ValueError, TypeError: the identifier is unknown, or the arguments are not those of the constraint.
        UserError: the language is unknown, or the library that tells languages is not installed.
    """
    kwargs = {name: value for name, value in (arguments or {}).items() if value is not None}
    for name, value in kwargs.items():
        if isinstance(value, float):  # which files in columns make of integers
            if value != int(value):  # int() raises for NaN and infinities
                raise ValueError(f"{name}: {value} is not a whole number")
            kwargs[name] = int(value)
    followed = _check(constraint, kwargs, text)  # first, so that a broken record shows on an empty text, too
    return bool(_plain(text).strip()) and followed


def follows_loosely(constraint: str, arguments: dict[str, Any] | None, text: str) -> bool:
    """Whether `text` follows a constraint in IFEval's loose reading.

    That is: as it stands, or without its first line, its last line or both, each also without asterisks.
    """
    lines = text.split("\n")
    parts = (text, "\n".join(lines[1:]).strip(), "\n".join(lines[:-1]).strip(), "\n".join(lines[1:-1]).strip())
    return any(follows(constraint, arguments, each) for part in parts for each in (part, part.replace("*", "")))


def _check(constraint: str, kwargs: dict[str, Any], text: str) -> bool:
    match constraint:
        case "keywords:existence":
            return has_keywords(text, **kwargs)
        case "keywords:frequency" | "keywords:word_count_different_numbers":
            return keyword_frequency(text, **kwargs)
        case "keywords:word_once":
            return keyword_once(text, **kwargs)
        case "keywords:forbidden_words":
            return no_forbidden_words(text, **kwargs)
        case "keywords:exclude_word_harder":
            return no_keyword(text, **kwargs)
        case "keywords:letter_frequency" | "letters:letter_counting2":
            return letter_frequency(text, **kwargs)
        case "keywords:no_adjacent_consecutive":
            return no_consecutive_initials(text, **kwargs)
        case "keywords:palindrome":
            return has_palindrome(text, **kwargs)
        case "keywords:keyword_specific_position":
            return keyword_at_position(text, **kwargs)
        case "keywords:start_end":
            return starts_and_ends_alike(text, **kwargs)
        case "count:lowercase_counting":
            return few_lowercase_words(text, **kwargs)
        case "count:count_increment_word":
            return one_then_two(text, **kwargs)
        case "count:count_unique":
            return unique_words(text, **kwargs)
        case "count:counting_composition":
            return composition(text, **kwargs)
        case "letters:letter_counting":
            return number_of_letters(text, **kwargs)
        case "length_constraints:number_words":
            return number_of_words(text, **kwargs)
        case "length_constraints:number_sentences":
            return number_of_sentences(text, **kwargs)
        case "length_constraints:number_paragraphs":
            return divided_paragraphs(text, **kwargs)
        case "length_constraints:nth_paragraph_first_word":
            return paragraph_begins_with(text, **kwargs)
        case "paragraphs:paragraphs":
            return divided_paragraphs(text, 2, **kwargs)
        case "paragraphs:paragraphs2":
            return two_spaced_paragraphs(text, **kwargs)
        case "language:response_language":
            return in_language(text, **kwargs)
        case "change_case:english_capital":
            return english_capitals(text, **kwargs)
        case "change_case:english_lowercase":
            return english_lowercase(text, **kwargs)
        case "change_case:capital_word_frequency":
            return capital_words(text, **kwargs)
        case "detectable_content:number_placeholders":
            return placeholders(text, **kwargs)
        case "detectable_content:postscript":
            return postscript(text, **kwargs)
        case "detectable_format:number_bullet_lists":
            return bullets(text, **kwargs)
        case "detectable_format:number_highlighted_sections":
            return highlights(text, **kwargs)
        case "detectable_format:multiple_sections":
            return sections(text, **kwargs)
        case "detectable_format:constrained_response":
            return one_choice(text, **kwargs)
        case "detectable_format:json_format":
            return is_json(text, **kwargs)
        case "detectable_format:title":
            return has_title(text, **kwargs)
        case "detectable_format:square_brackets":
            return words_in_brackets(text, **kwargs)
        case "detectable_format:bigram_wrapping":
            return wrapped_bigrams(text, **kwargs)
        case "detectable_format:sentence_hyphens":
            return hyphenated_sentences(text, **kwargs)
        case "combination:two_responses":
            return two_responses(text, **kwargs)
        case "combination:repeat_prompt":
            return begins_with_prompt(text, **kwargs)
        case "copy:copy" | "copy:copying_simple":
            return is_copy(text, **kwargs)
        case "copy:copying_multiple":
            return is_several_copies(text, **kwargs)
        case "new:copy_span_idx":
            return is_copy_of_span(text, **kwargs)
        case "copy:repeat_phrase":
            return varied_phrase(text, **kwargs)
        case "startend:end_checker":
            return ends_with(text, **kwargs)
        case "startend:quotation":
            return in_quotation_marks(text, **kwargs)
        case "first_word:first_word_answer":
            return first_word(text, **kwargs)
        case "first_word:first_word_sent":
            return first_word_of_sentences(text, **kwargs)
        case "last_word:last_word_answer":
            return last_word_is(text, **kwargs)
        case "last_word:last_word_sent":
            return last_word_of_sentences(text, **kwargs)
        case "punctuation:no_comma":
            return lacks(text, _COMMAS, **kwargs)
        case "punctuation:punctuation_dot":
            return lacks(text, _FULL_STOPS, **kwargs)
        case "punctuation:punctuation_exclamation":
            return lacks(text, _EXCLAMATIONS, **kwargs)
    raise ValueError(f"unknown constraint {constraint!r}")


# --- Parts of a text --------------------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """Runs of letters, digits and underscores."""
    return re.findall(r"\w+", text)


def sentences_of(text: str) -> list[str]:
    """What ends with `.`, `!` or `?` (and closing quotes or brackets) before a blank; the rest is one, too."""
    sentences, begin = [], 0
    for end in _SENTENCE_END.finditer(text):
        if not _ABBREVIATION.search(text[max(begin, end.end() - 8) : end.end()]):
            sentences.append(text[begin : end.end()])
            begin = end.end()
    return [sentence.strip() for sentence in (*sentences, text[begin:]) if sentence.strip()]


def _parts(text: str, divider: str) -> list[str] | None:
    """The parts between dividers, an empty first and last one aside; None if another part is empty."""
    parts = [part.strip() for part in re.split(divider, text)]
    inner = parts[not parts[0] : len(parts) - (not parts[-1])]
    return inner if all(inner) else None


def _plain(text: str) -> str:
    """For checks that something is absent or rare: compatibility forms as the plain characters, nothing invisible."""
    folded = unicodedata.normalize("NFKC", text)
    return "".join(char for char in folded if unicodedata.category(char) != "Cf")


def _count(text: str, keyword: str) -> int:
    """How often a word begins with `keyword`, in any case."""
    start = r"(?<![a-z0-9_])" if re.match(r"[A-Za-z0-9_]", _text(keyword)) else ""
    return len(re.findall(start + re.escape(_plain(keyword)), _plain(text), re.IGNORECASE))


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(_text(word))}(?!\w)", _plain(text), re.IGNORECASE) is not None


def _text(argument: Any) -> str:
    """An argument that has to be text; the empty one would be found everywhere."""
    if not isinstance(argument, str) or not argument.strip():
        raise ValueError(f"{argument!r} is no text to look for")
    return argument


def _listed(argument: Any) -> Sequence[str]:
    if not isinstance(argument, list) or not argument:
        raise ValueError(f"{argument!r} is no list of words")
    return [_text(word) for word in argument]


def _holds(count: int, relation: str, number: int) -> bool:
    """`count` is `at least` or `less than` a number: the two relations that there are."""
    if relation not in ("at least", "less than"):
        raise ValueError(f"unknown relation {relation!r}")
    return count >= number if relation == "at least" else count < number


def _same(text: str, other: str) -> bool:
    return text.strip().lower() == _text(other).strip().lower()


# --- Words and letters ------------------------------------------------------------------------------------------------


def has_keywords(text: str, keywords: list[str]) -> bool:
    """Every keyword occurs."""
    return all(_count(text, keyword) > 0 for keyword in _listed(keywords))


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """The keyword occurs at least, or less than, so many times."""
    return _holds(_count(text, keyword), relation, frequency)


def keyword_once(text: str, keyword: str) -> bool:
    """The keyword occurs once."""
    return _count(text, keyword) == 1


def no_forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    """None of the words occurs; longer words with it are allowed."""
    return not any(_has_word(text, word) for word in _listed(forbidden_words))


def no_keyword(text: str, keyword: str, instruction: str = "") -> bool:
    """The word does not occur. `instruction` is the sentence of the prompt that it was taken from, and not used."""
    return not _has_word(text, keyword)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """The letter, in any case, occurs at least, or less than, so many times."""
    if len(_text(letter)) != 1:
        raise ValueError(f"{letter!r} is not one letter")
    return _holds(_plain(text).lower().count(_plain(letter).lower()), let_relation, let_frequency)


def number_of_letters(text: str, N: int, relation: str) -> bool:
    """At least, or less than, N letters from A to Z."""
    return _holds(len(re.findall(r"[a-zA-Z]", _plain(text))), relation, N)


def no_consecutive_initials(text: str) -> bool:
    """No word begins with the letter of the alphabet that follows the first letter of the word before."""
    initials = [word.strip("_")[:1].lower() for word in words_of(text)]
    letters = [ord(initial) if initial.isalpha() and len(initial) == 1 else None for initial in initials]
    return not any(a is not None and b is not None and b - a == 1 for a, b in pairwise(letters))


def has_palindrome(text: str) -> bool:
    """A word of three letters or more reads the same backwards."""
    words = [word.lower() for word in words_of(text)]
    return any(len(word) >= 3 and word.isalpha() and word == word[::-1] for word in words)


def keyword_at_position(text: str, keyword: str, n: int, m: int) -> bool:
    """The keyword is the m-th word of the n-th sentence, counted from 1."""
    sentences = sentences_of(text)
    if n < 1 or m < 1:
        raise ValueError(f"sentence {n}, word {m}: both count from 1")
    words = words_of(sentences[n - 1]) if n <= len(sentences) else []
    return m <= len(words) and words[m - 1] == _text(keyword)


def starts_and_ends_alike(text: str) -> bool:
    """The first word is also the last one, with nothing after it."""
    words = words_of(text)
    return len(words) > 1 and words[0].lower() == words[-1].lower() and text.rstrip().endswith(words[-1])


def few_lowercase_words(text: str, N: int) -> bool:
    """At most N words in lower case."""
    return sum(word.isalpha() and word.islower() for word in words_of(_plain(text))) <= N


def one_then_two(text: str, keyword1: str, keyword2: str) -> bool:
    """The first keyword occurs once, the second one twice."""
    return _count(text, keyword1) == 1 and _count(text, keyword2) == 2


def unique_words(text: str) -> bool:
    """No word occurs twice, whatever its case."""
    words = [word.lower() for word in words_of(_plain(text))]
    return len(words) > 0 and len(set(words)) == len(words)


# --- Length and paragraphs --------------------------------------------------------------------------------------------


def number_of_words(text: str, num_words: int, relation: str) -> bool:
    """At least, or less than, so many words."""
    return _holds(len(words_of(text)), relation, num_words)


def number_of_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """At least, or less than, so many sentences."""
    return _holds(len(sentences_of(text)), relation, num_sentences)


def divided_paragraphs(text: str, num_paragraphs: int) -> bool:
    """So many paragraphs, separated by the divider `***`."""
    paragraphs = _parts(text, r"\s?\*\*\*\s?")
    return paragraphs is not None and len(paragraphs) == num_paragraphs


def two_spaced_paragraphs(text: str) -> bool:
    """Two paragraphs, separated by an empty line."""
    paragraphs = _parts(text, r"\n\n")
    return paragraphs is not None and len(paragraphs) == 2


def paragraph_begins_with(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """So many paragraphs, separated by empty lines, of which the n-th begins with the word, in any case."""
    if not 1 <= nth_paragraph <= num_paragraphs:
        raise ValueError(f"paragraph {nth_paragraph} of {num_paragraphs}")
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs:
        return False
    word = re.split(r"[.,?!'\"]", paragraphs[nth_paragraph - 1].split()[0].lstrip("'\""))[0]
    return _same(word, first_word)


def composition(text: str, n_sent: int, n_words: int) -> bool:
    """Three paragraphs, divided by `***`, of n_sent sentences with n_words words each."""
    paragraphs = _parts(text, r"\s?\*\s?\*\s?\*\s?")
    return (
        paragraphs is not None
        and len(paragraphs) == 3
        and all(len(sentences_of(paragraph)) == n_sent for paragraph in paragraphs)
        and all(len(words_of(sentence)) == n_words for part in paragraphs for sentence in sentences_of(part))
    )


# --- Language and case ------------------------------------------------------------------------------------------------


def in_language(text: str, language: str) -> bool:
    """The text is in the language (ISO 639): that is what is most probable for it."""
    check_language(language)
    return any(map(str.isalpha, text)) and classify(text)[0] == language


def english_capitals(text: str) -> bool:
    """English, and all letters are capitals."""
    return text.isupper() and _may_be_english(text)


def english_lowercase(text: str) -> bool:
    """English, and no letter is a capital."""
    return text.islower() and _may_be_english(text)


def _may_be_english(text: str) -> bool:
    """Letters from A to Z; of a text that is long enough to tell, English is what is most probable."""
    letters = [char for char in text if char.isalpha()]
    is_short = len(letters) < _LETTERS_TO_TELL
    return all(char.isascii() for char in letters) and (is_short or classify(text.lower())[0] == "en")


def capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """At least, or less than, so many words in capitals."""
    return _holds(sum(word.isupper() for word in words_of(_plain(text))), capital_relation, capital_frequency)


# --- Format -----------------------------------------------------------------------------------------------------------


def placeholders(text: str, num_placeholders: int) -> bool:
    """At least so many placeholders in square brackets."""
    return sum(bool(inner.strip()) for inner in re.findall(r"\[([^\[\]]+)\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    """A postscript, which begins with the marker, blanks after its full stops or not."""
    letters = re.escape(_text(postscript_marker).strip()).replace(r"\.", r"\.\s?").removesuffix(r"\s?")
    return re.search(rf"(?<!\S){letters}", text, re.IGNORECASE) is not None


def bullets(text: str, num_bullets: int) -> bool:
    """So many lines that begin with `*` or `-`."""
    return len(re.findall(r"^[ \t]*(?:\*[^*\n]|-)", text, re.MULTILINE)) == num_bullets


def highlights(text: str, num_highlights: int) -> bool:
    """At least so many sections *highlighted* or **highlighted**."""
    single, double = re.findall(r"\*([^\n*]*)\*", text), re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(inner.strip()) for inner in (*single, *double)) >= num_highlights


def sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections, each headed by the splitter and a number."""
    return len(re.findall(rf"{re.escape(_text(section_spliter))}\s?\d+", text)) >= num_sections


def one_choice(text: str) -> bool:
    """One of the three answers occurs, and no other."""
    return sum(choice in text for choice in _CHOICES) == 1


def is_json(text: str) -> bool:
    """The whole text is JSON, fenced or not."""
    fenced = re.fullmatch(r"```(?:json)?(.*)```", text.strip(), re.DOTALL | re.IGNORECASE)
    try:
        json.loads(fenced[1].strip() if fenced else text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    """A <<title>> on one line."""
    titles = (line.partition("<<")[2].rpartition(">>")[0] for line in text.split("\n"))
    return any(title.strip(" \t<>") for title in titles)


def words_in_brackets(text: str) -> bool:
    """Every word in [square] [brackets]."""
    return all(re.fullmatch(r"\[.+\]", word) for word in text.split())


def wrapped_bigrams(text: str) -> bool:
    """Two words each in <<double angular>> <<brackets, as>> here; an odd last word may stand alone."""
    pair = r"<<[^\s<>]+\s+[^\s<>]+>>"
    return re.fullmatch(rf"{pair}(?:\s+{pair})*(?:\s+[^\s<>]+)?", text.strip()) is not None


def hyphenated_sentences(text: str) -> bool:
    """Sentences connected by hyphens.-With no blanks between them."""
    return len(sentences_of(text)) == 1 and not re.search(r"[a-z][.!?][A-Z]|-\s|\s-", text.strip())


# --- The whole text ---------------------------------------------------------------------------------------------------


def two_responses(text: str) -> bool:
    """Two different responses, separated by `******`."""
    responses = _parts(text, r"\*{6}")
    return responses is not None and len(responses) == 2 and responses[0] != responses[1]


def begins_with_prompt(text: str, prompt_to_repeat: str) -> bool:
    """The request comes first, word for word."""
    return text.strip().lower().startswith(_text(prompt_to_repeat).strip().lower())


def is_copy(text: str, prompt_to_repeat: str) -> bool:
    """The request, word for word, and nothing else."""
    return _same(text, prompt_to_repeat)


def is_several_copies(text: str, prompt_to_repeat: str, N: int) -> bool:
    """The request N times, separated by `******`."""
    copies = text.split("******")
    return len(copies) == N and all(_same(copy, prompt_to_repeat) for copy in copies)


def is_copy_of_span(text: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """The characters of the request from n_start up to n_end, the latter not included."""
    return _same(text, _text(prompt_to_repeat)[n_start:n_end])


def varied_phrase(text: str, phrase: str, small_n: int) -> bool:
    """The phrase so many times, each time with one other word between its first and its last."""
    wanted, found = _text(phrase).split(), list[str]()
    for line in text.split("\n"):  # as re.findall("FIRST .*? LAST"), which takes quadratic time where no LAST comes
        begin = line.find(f"{wanted[0]} ")
        while begin >= 0 and (last := line.find(f" {wanted[-1]}", begin + len(wanted[0]) + 1)) >= 0:
            end = last + 1 + len(wanted[-1])
            found.append(line[begin:end])
            begin = line.find(f"{wanted[0]} ", end)
    return len(found) == small_n and all(
        len(words) == len(wanted) and sum(a != b for a, b in zip(words, wanted, strict=True)) == 1
        for words in map(str.split, found)
    )


def ends_with(text: str, end_phrase: str) -> bool:
    """The phrase comes last, in any case; quotation marks around the text do not count."""
    return text.strip().strip('"').lower().endswith(_text(end_phrase).strip().lower())


def in_quotation_marks(text: str) -> bool:
    """The whole text in double quotation marks."""
    stripped = text.strip()
    return len(stripped) > 2 and stripped[0] == stripped[-1] == '"'


def first_word(text: str, first_word: str) -> bool:
    """The first word, up to the first blank, is the one given, in any case."""
    return _same((text.split() or [""])[0], first_word)


def first_word_of_sentences(text: str, first_word: str) -> bool:
    """Every sentence begins with the word, in any case."""
    return all(_same(sentence.split()[0], first_word) for sentence in sentences_of(text) or ["-"])


def last_word_is(text: str, last_word: str) -> bool:
    """The last word is the one given, in any case; punctuation does not count."""
    return _same(re.sub(r"[^\w\s]", "", (text.split() or [""])[-1]), last_word)


def last_word_of_sentences(text: str, last_word: str) -> bool:
    """Every sentence ends with the word, in any case; punctuation does not count."""
    return all(last_word_is(sentence, last_word) for sentence in sentences_of(text) or ["-"])


def lacks(text: str, marks: str) -> bool:
    """None of the marks occurs, in any form of it."""
    return not set(marks) & set(_plain(text))
