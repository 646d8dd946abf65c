"""Our language filter, loaded once in each process: `datasets` pickles what it maps, and the model can't be pickled."""

from functools import cache

from recipes.preparation.language import LanguageFilter


@cache
def english() -> LanguageFilter:
    return LanguageFilter(["en"], 0.5)
