"""The catalog of mutations matches the current package."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.mutations.__main__ import ROOT
from tests.mutations.catalogue import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_applies_once_and_leaves_valid_python(mutation: Mutation, tmp_path):
    copy = tmp_path / mutation.file
    copy.parent.mkdir(parents=True)
    original = (ROOT / mutation.file).read_text(encoding="utf-8")
    copy.write_text(original, encoding="utf-8")
    mutation.apply(tmp_path)
    changed = copy.read_text(encoding="utf-8")
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(original))


def test_mutation_that_does_not_fit_is_refused(tmp_path):
    (tmp_path / "module.py").write_text("a = 1\nb = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="occurs 2 times in module.py, expected once"):
        Mutation("twice", "module.py", "= 1", "= 2", ()).apply(tmp_path)
    with pytest.raises(ValueError, match="occurs 0 times"):
        Mutation("nowhere", "module.py", "= 3", "= 2", ()).apply(tmp_path)


def test_mutations_have_distinct_names_and_existing_tests():
    assert max(Counter(mutation.name for mutation in MUTATIONS).values()) == 1
    assert all(mutation.tests for mutation in MUTATIONS)
    missing = [test for mutation in MUTATIONS for test in mutation.tests if not (ROOT / test).exists()]
    assert not missing
