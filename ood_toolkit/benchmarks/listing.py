"""What there is to choose from, as `ood-bench --list` prints it."""

from ood_toolkit.calibrators import Calibrator
from ood_toolkit.fitted import Fitted
from ood_toolkit.registry import calibrator_classes, detector_classes, ensemble_classes


def listing(*, wide: bool = False) -> str:
    """Three aligned tables: detectors, calibrators, ensembles.

    Args:
        wide: cut papers to what fits a terminal of 160 columns; otherwise they are whole.
    """
    detectors = [
        (name, kind.family, "held-out" if kind.held_out else kind.needs, kind.cost or "—", _paper(kind, wide))
        for name, kind in detector_classes().items()
    ]
    calibrators = [
        (name, kind.family, "yes" if kind.preserves_argmax else "no", _paper(kind, wide))
        for name, kind in calibrator_classes().items()
    ]
    ensembles = [(name, _paper(kind, wide)) for name, kind in ensemble_classes().items()]
    return "\n\n".join(
        (
            _aligned(
                f"{len(detectors)} detectors", ("name", "family", "fit needs", "cost per row", "paper"), detectors
            ),
            _aligned(f"{len(calibrators)} calibrators", ("name", "family", "keeps argmax", "paper"), calibrators),
            _aligned(f"{len(ensembles)} ensembles", ("name", "paper"), ensembles),
        )
    )


def _paper(kind: type[Fitted] | type[Calibrator], wide: bool) -> str:
    paper = kind.paper or "—"
    return paper if not wide or len(paper) <= 90 else paper[:89] + "…"


def _aligned(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
    return "\n".join((title, *lines))
