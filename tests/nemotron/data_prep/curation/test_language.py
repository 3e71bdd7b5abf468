"""Languages of texts that no list in this project has a word order of."""

from __future__ import annotations

import pytest

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.language import check_languages, identify, judge
from nemotron.data_prep.curation.step import Drop, Keep
from nemotron.kit.schemas.curation import LanguageSettings

pytest.importorskip("py3langid")

TEXTS = {
    "en": "The committee will meet again on Thursday to discuss the budget and to elect a new chairwoman.",
    "de": "Der Ausschuss trifft sich am Donnerstag wieder, um den Haushalt zu besprechen und den Vorsitz zu wählen.",
    "fr": "Le comité se réunira de nouveau jeudi afin de discuter du budget et d'élire une nouvelle présidente.",
    "es": "El comité se reunirá de nuevo el jueves para hablar del presupuesto y elegir a una nueva presidenta.",
    "it": "Il comitato si riunirà di nuovo giovedì per discutere del bilancio ed eleggere una nuova presidente.",
    "nl": "De commissie komt donderdag opnieuw bijeen om de begroting te bespreken en een nieuwe voorzitter te kiezen.",
    "pl": "Komisja zbierze się ponownie w czwartek, aby omówić budżet i wybrać nową przewodniczącą na przyszły rok.",
    "ru": "Комитет снова соберётся в четверг, чтобы обсудить бюджет и выбрать новую председательницу.",
    "ja": "委員会は木曜日に再び集まり、予算について話し合い、新しい議長を選びます。来年度の計画も議題になります。",
}


@pytest.mark.parametrize("language", TEXTS)
def test_languages(language: str) -> None:
    found, probability = identify(TEXTS[language], LanguageSettings(min_letters=20))
    assert found == language
    assert 0.3 <= probability <= 1


def document(text: str) -> dict[str, str]:
    return {"id": "a", "text": text}


def test_wanted_languages_stay_with_name_and_probability() -> None:
    kept = judge(document(TEXTS["de"]), LanguageSettings(keep=["en", "de"]))
    assert isinstance(kept, Keep)
    assert kept.document["language"] == "de"
    assert kept.document["language_score"] > 0.3
    assert kept.notes == ("de",)
    dropped = judge(document(TEXTS["fr"]), LanguageSettings(keep=["en", "de"]))
    assert isinstance(dropped, Drop)
    assert dropped.reason == "language fr"


def test_below_the_threshold_a_language_is_unsure() -> None:
    text = TEXTS["nl"] + " " + TEXTS["de"]
    _, probability = identify(text, LanguageSettings())
    dropped = judge(document(text), LanguageSettings(keep=["nl", "de"], threshold=probability + 0.001))
    assert isinstance(dropped, Drop)
    assert dropped.reason == "language unsure"


@pytest.mark.parametrize("text", ["", "Ok.", "1234 5678 !!! ??? " * 50, "==== | ---- | ####" * 40])
def test_too_few_letters_are_not_guessed_at(text: str) -> None:
    assert identify(text, LanguageSettings()) == ("und", 0.0)
    dropped = judge(document(text), LanguageSettings(short_texts="drop"))
    assert isinstance(dropped, Drop)
    assert dropped.reason == "too short to tell"
    kept = judge(document(text), LanguageSettings(short_texts="keep"))
    assert isinstance(kept, Keep)
    assert kept.document["language"] == "und"


def test_of_a_long_text_the_middle_counts() -> None:
    menu = "Startseite Nachrichten Veranstaltungen Anmeldung Impressum Datenschutz "
    text = menu * 3 + TEXTS["en"] * 60 + menu * 3
    assert identify(text, LanguageSettings(max_chars=1000))[0] == "en"


def test_a_table_at_the_beginning_does_not_hide_the_text_behind_it() -> None:
    text = "1 2 3 4 5\n" * 400 + TEXTS["en"] * 60
    assert identify(text, LanguageSettings(max_chars=1000))[0] == "en"


def test_an_unknown_language_is_refused_with_a_near_one() -> None:
    check_languages(("en", "de"))
    with pytest.raises(UserError, match="unknown language 'eng'") as refused:
        check_languages(("en", "eng"))
    assert refused.value.hint == "did you mean en?"
    with pytest.raises(UserError, match="unknown language 'english'") as refused:
        check_languages(("english",))
    assert "[en, de]" in (refused.value.hint or "")
