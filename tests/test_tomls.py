"""TOML that is written is read back as it was."""

import tomllib

from hypothesis import example, given
from hypothesis import strategies as st

from clustersim.core.tomls import toml_text, toml_value

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = TEXTS | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=8)


@given(st.dictionaries(TEXTS, VALUES))
@example({"ü": 1, "a.b": {"": "\x7f\r", "c": {}}})
def test_a_table_is_read_back_as_it_was(table):
    assert tomllib.loads(toml_text(table)) == table


@given(VALUES)
@example({"b c": ['x"\n', float("inf")]})
def test_a_value_is_read_back_as_it_was(value):
    assert tomllib.loads(f"value = {toml_value(value)}")["value"] == value


def test_what_is_none_is_left_out():
    assert toml_text({"a": None, "b": {"c": None, "d": 1}}) == "[b]\nd = 1\n"
