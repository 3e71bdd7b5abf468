"""Which language a text is in, by py3langid's model (`kit/language.py`), and which languages stay."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.step import Document, Drop, Keep
from nemotron.kit.language import check_language, classify
from nemotron.kit.schemas.curation import LanguageSettings

UNDETERMINED = "und"
"""ISO 639 for a text whose language cannot be told."""


def check_languages(languages: Sequence[str]) -> None:
    """UserError for a language that the model does not know, naming a near one."""
    for language in languages:
        try:
            check_language(language)
        except UserError as error:
            raise error.at("keep") from None


def identify(text: str, settings: LanguageSettings) -> tuple[str, float]:
    """The most probable language of a text and its probability; `("und", 0.0)` for one that is too short to tell."""
    begin = max(0, (len(text) - settings.max_chars) // 2)
    middle = text[begin : begin + settings.max_chars]
    if sum(map(str.isalpha, middle)) < settings.min_letters:
        return UNDETERMINED, 0.0
    language, probability = classify(middle)
    return language, round(probability, 4)


def judge(document: Document, settings: LanguageSettings) -> Keep | Drop:
    """Keep a document of a wanted language, with `language` and `language_score` added; drop the others."""
    language, probability = identify(document["text"], settings)
    document |= {"language": language, "language_score": probability}
    if language == UNDETERMINED:
        if settings.short_texts == "drop":
            return Drop("too short to tell")
        return Keep(document, (UNDETERMINED,))
    if probability < settings.threshold:
        return Drop("language unsure", f"{language} {probability:.2f}")
    if language not in settings.keep:
        return Drop(f"language {language}", f"{probability:.2f}")
    return Keep(document, (language,))
