"""Every public name, parameter, attribute, command, option and kind of error has a test that proves it."""

from __future__ import annotations

from tests.features import features, ledger, mentions, story

MOST_INSIDE = 37
"""How many features rest on tests that reach inside the product. It may only fall: set it where they became fewer."""


def test_every_feature_has_its_line_and_no_line_is_without_a_feature() -> None:
    assert ledger().keys() == features().keys(), (
        "`python -m tests.features` prints the lines that are missing"
    )


def test_the_tests_named_are_there_and_use_their_feature() -> None:
    words, wrong = features(), []
    for key, test in ledger().items():
        found = story(test)
        if found is None or not mentions(words.get(key, key), found.text):
            wrong.append(f"{key}: {test}")
    assert wrong == []


def test_no_more_features_rest_on_tests_that_reach_inside() -> None:
    """Tests that use public names alone stay as they are when modules are merged or moved."""
    inside = [key for key, test in ledger().items() if (found := story(test)) and not found.is_public]
    assert len(inside) <= MOST_INSIDE, inside
