import pytest

from ood_toolkit.citations import bibliography, bibtex


def test_entries_come_once_in_the_order_of_the_names():
    text = bibtex(["vim", "energy(temperature=2)", "energy"])
    assert text.index("Virtual-logit Matching") < text.index("Energy-based Out-of-distribution Detection")
    assert text.count("@") == 2


def test_every_entry_is_whole():
    for key, entry in bibliography().items():
        assert entry.count("{") == entry.count("}"), key
        assert "title" in entry, key
        assert "year" in entry, key


def test_keys_are_unique():
    from pathlib import Path

    import ood_toolkit

    text = Path(ood_toolkit.__file__).with_name("references.bib").read_text(encoding="utf-8")
    assert sum(line.startswith("@") for line in text.splitlines()) == len(bibliography())


def test_a_method_of_another_package_is_cited_by_the_package():
    assert bibtex(["netcal:BBQ(score_function='AIC')"]) == bibtex(["netcal"])


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="no method is named 'enrgy'"):
        bibtex(["enrgy"])


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("temperature+msp", ["temperature", "msp"]),
        ("tuned+knn(k=5)", ["knn"]),
        ("react+gen", ["react", "gen"]),
        ("tuned+react+gen", ["react", "gen"]),
        ("netcal:BBQ+entropy", ["netcal", "entropy"]),
    ],
)
def test_a_composition_cites_all_its_parts(spec, parts):
    assert bibtex([spec]) == bibtex(parts)


@pytest.mark.parametrize(("name", "near"), [("mahalanobs", "mahalanobis"), ("temprature+msp", "temperature")])
def test_an_unknown_name_gets_the_nearest_one(name, near):
    with pytest.raises(ValueError, match=f"did you mean '{near}'"):
        bibtex([name])
