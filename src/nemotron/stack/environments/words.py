"""The vocabulary of the task families: 128 short English words in eight categories that do not overlap.

One list for all families, so that a small model meets each word often; a word belongs to exactly one category, which
makes "which is a fruit?" and "the odd one out" have one right answer.
"""

from __future__ import annotations

from functools import cache

from nemo_runspec.errors import UserError

_WORDS = """
animal: cat dog horse cow sheep goat lion tiger bear wolf mouse rabbit eagle duck frog snake
color: red blue green yellow black white brown pink purple gray cyan magenta violet scarlet maroon beige
fruit: apple banana pear grape lemon mango melon fig kiwi papaya cherry guava berry coconut apricot quince
tool: hammer saw drill wrench pliers shovel axe rake chisel ruler knife ladder brush needle hoe clamp
body: hand foot arm leg eye ear nose mouth knee elbow finger neck head tooth chin thumb
job: doctor nurse teacher farmer baker pilot lawyer judge actor singer writer waiter tailor miner painter sailor
vehicle: car bus train boat ship truck bike plane tram van taxi ferry sled canoe tractor scooter
clothing: shirt hat coat shoe sock scarf glove belt dress skirt jacket boot jeans vest tie hood
"""
CATEGORIES: dict[str, tuple[str, ...]] = {
    category: tuple(words.split()) for category, words in (line.split(":") for line in _WORDS.strip().splitlines())
}
CATEGORY_OF: dict[str, str] = {word: category for category, words in CATEGORIES.items() for word in words}
MAX_WORDS_PER_CATEGORY = 16


@cache
def words_by_category(words_per_category: int) -> dict[str, tuple[str, ...]]:
    """The first `words_per_category` words (2 to 16) of each of the eight categories."""
    if not 2 <= words_per_category <= MAX_WORDS_PER_CATEGORY:
        raise UserError(f"words_per_category = {words_per_category}: allowed are 2 to {MAX_WORDS_PER_CATEGORY}")
    return {category: words[:words_per_category] for category, words in CATEGORIES.items()}


@cache
def word_list(words_per_category: int) -> tuple[str, ...]:
    """All words of `words_by_category(words_per_category)`, in a fixed order: 8 x words_per_category of them."""
    return tuple(word for words in words_by_category(words_per_category).values() for word in words)
