"""Which language a text is in, by py3langid's model, and which languages stay.

py3langid is naive Bayes over byte n-grams for 97 languages and more (the method of Lui and Baldwin 2012, "langid.py");
its model comes with the package as plain arrays, so that nothing is downloaded and no pickle is read. Its scores are
normalised to probabilities with a temperature of the square root of the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from nemo_runspec.errors import UserError, nearest
from nemo_runspec.installation import install_line
from nemotron.data_prep.curation.step import Document, Drop, Keep
from nemotron.kit.schemas.curation import LanguageSettings

UNDETERMINED = "und"
"""ISO 639 for a text whose language cannot be told."""


def check_languages(languages: Sequence[str]) -> None:
    """UserError for a language that the model does not know, naming a near one."""
    known = set(_identifier().labels)
    for language in languages:
        if language not in known:
            near = nearest(language, sorted(known))
            hint = f"did you mean {near}?" if near else "languages are named by their codes in ISO 639, as in [en, de]"
            raise UserError(f"keep: unknown language {language!r}", hint)


def identify(text: str, settings: LanguageSettings) -> tuple[str, float]:
    """The most probable language of a text and its probability; `("und", 0.0)` for one that is too short to tell."""
    if sum(map(str.isalpha, text[: settings.max_chars])) < settings.min_letters:
        return UNDETERMINED, 0.0
    begin = max(0, (len(text) - settings.max_chars) // 2)
    language, probability = _identifier().classify(text[begin : begin + settings.max_chars])
    return str(language), round(float(probability), 4)


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


@cache
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise UserError("language identification needs py3langid", install_line("curation")) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
