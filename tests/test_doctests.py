import doctest
import importlib
import pkgutil

import pytest

import ood_toolkit

MODULES = [
    m.name for m in pkgutil.walk_packages(ood_toolkit.__path__, "ood_toolkit.") if m.name != "ood_toolkit.__main__"
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_print_what_they_say(name: str):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0
