"""`docs/methods.md`, made from the classes themselves: `python -m ood_toolkit.methods_page docs/methods.md`."""

import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ood_toolkit.calibrators import Calibrator, EnsemblePool
from ood_toolkit.detectors import Detector, LiveDetector
from ood_toolkit.registry import calibrator_classes, detector_classes, ensemble_classes

Method = type[Detector | LiveDetector | Calibrator | EnsemblePool]

FAMILIES = {
    "logits": "Logits",
    "features": "Features and head",
    "layers": "Several layers",
    "live": "Live: the model runs again",
    "uncertainty": "Several predictions per input",
    "vision-language": "Vision-language",
    "scaling": "Scaling",
    "binning": "Binning",
    "isotonic": "Isotonic",
    "composition": "Compositions",
    "prior": "Class frequencies",
    "ensemble": "Ensembles",
}
"""Headings by the families of detectors and calibrators, in the order of the page."""

LETTERS = (
    ("z, p, y", "logits, their softmax (at temperature T where T occurs), the predicted class"),
    ("f, f̂, D", "feature, the same at unit length, its dimensions"),
    ("W, w_c, b, C", "weight and bias of the head, the weight of class c, classes"),
    ("μ, μ_c, Σ", "mean training feature, that of class c, covariance"),
    ("f_i", "a training row"),
    ("z₍₁₎, p₍₁₎", "the largest of a row, then the second largest"),
    ("S(z)", "the head score of logits: −log Σ_c exp(z_c) unless `score=` names another"),
    ("s₁, s₂", "sum of a row's features, and of the largest of them, those above the percentile"),
    ("U, R, P", "principal axes, the axes left over, the projection on principal axes"),
    ("t_c, n_j, o_j", "unit-length text embeddings of classes, negative labels, outlier prompts"),
    ("z_m, p_m, M", "logits and softmax of member m, members"),
    ("H, KL", "entropy and Kullback-Leibler divergence, in nats"),
    ("σ, relu, ⊙", "logistic function, max(·, 0), product by element"),
    ("g(p)", "calibrated confidence of the predicted class; the others share 1 − g(p)"),
    ("E[·]", "mean over training rows"),
)

OTHER_NAMES = (
    ("MLS, MaxLogit", "maxlogit"),
    ("EBO, energy-based", "energy"),
    ("WeightedEBO, weighted energy", "weighted_energy"),
    ("temperature scaling as a detector", "tempscale"),
    ("KLM", "kl_matching"),
    ("MDS; MDS over several layers; MDS with input perturbation", "mahalanobis, mahalanobis_layers, odin_mahalanobis"),
    ("Mahalanobis++, RMDS++", "mahalanobis_pp, rmds_pp"),
    ("GMM, GDA, GEM", "gmm"),
    ("NAC-UE", "nac"),
    ("CF-OOD", "cfood"),
    ("class-mean cosine; relative cosine", "maxcosine; rcos"),
    ("ensemble, deep ensemble, BALD", "predictive_entropy, mutual_information, variation_ratio, expected_entropy"),
    ("CLIP max cosine, max-logit on CLIP", "clip_cosine"),
    ("ReAct + GEN and the like", '`react(score="gen")`, of every rectifier'),
)

LEFT_OUT = (
    (
        "i-ODIN",
        "ODIN's step on the one number of the image with the largest gradient; at ε = 0.0014 a small network ranked 64 "
        "images exactly as `odin(eps=0)` does",
    ),
    ("PCA fusion (Guan et al.)", "its feature part is `pca`; the paper fuses it with a logit score"),
    (
        "Projection, ReAct + projection (`detectors`)",
        "trajectories of class cosines through every layer of the network",
    ),
    (
        "CombOOD",
        "sums a KNN and a Mahalanobis distance of the extremes of every layer's map, not of pooled features; its "
        "entry on the OpenOOD board is disputed by 13 to 22 points",
    ),
    ("SEM", "a score of full-spectrum OOD, from low-level statistics of shallow layers; `gmm` is its mixture alone"),
    ("ARGM (`detectors`)", "returns the number of the predicted class: a placeholder, not a score"),
    ("GAIA", "counts abnormal gradients in inner layers: a backward pass per image through the whole network"),
    ("ExGrad", "its authors find gradient scores no better than scores without gradients; see `gradnorm`"),
    ("OpenGAN", "trains a generator and a discriminator"),
    ("Laplace, ABNN, DEUP", "fit a posterior or a second network; their samples can be scored as `member_logits`"),
    ("ConfidNet, DeVries, Deep Gamblers, CIDER, NPOS, GODIN, MOS, RTS, T2FNorm, VOS's training", "change the training"),
    ("CLIPN", "trains a second text encoder that says no"),
    ("LAPT", "tunes prompts on generated and retrieved images"),
    ("AdaNeg, ANTS, TANL", "adapt to the test stream: a row's score depends on the rows before it"),
    ("PatchCore, DRAEM, CutPaste, RD4AD and the like", "one-class anomaly detection without a classifier"),
)
"""What other toolkits or papers have and this one has not, with the reason."""


def page() -> str:
    """The whole of `docs/methods.md`."""
    calibrators = {**calibrator_classes(), **ensemble_classes()}
    parts = [
        "# Methods",
        "<!-- Generated by `python -m ood_toolkit.methods_page docs/methods.md`. Edit the docstrings instead. -->",
        f"{len(detector_classes())} detectors, {len(calibrator_classes())} calibrators and {len(ensemble_classes())} "
        "ways to pool an ensemble, as implemented. Every score is higher for more out-of-distribution inputs, or for "
        "predictions more likely wrong. `ood-bench cite NAME` prints the BibTeX entry; "
        "[conventions.md](conventions.md) tells where other tools' numbers differ, and why.",
        "[Detectors](#detectors) · [Calibrators](#calibrators) · [Other names](#other-names) · [Left out](#left-out)",
        "## Letters",
        table(("letters", "meaning"), ((f"`{a}`" if "`" not in a else a, b) for a, b in LETTERS)),
        "## Detectors",
        *section(detector_classes()),
        "## Calibrators",
        "They learn from held-out logits and labels; [conventions-calibrators.md](conventions-calibrators.md) has the "
        "rules that all of them keep.",
        *section(calibrators),
        "## Other names",
        table(("elsewhere", "here"), OTHER_NAMES),
        "## Left out",
        table(("method", "why"), LEFT_OUT),
    ]
    return "\n\n".join(parts) + "\n"


def section(methods: Mapping[str, Method]) -> Iterator[str]:
    """Families with a list of their methods, then every method."""
    for family, heading in FAMILIES.items():
        here = {name: kind for name, kind in methods.items() if kind.family == family}
        if here:
            yield f"### {heading}"
            yield " · ".join(f"[{name}](#{name})" for name in here)
            yield from (entry(kind) for kind in here.values())


def entry(kind: Method) -> str:
    """One method: equation, idea, hyper-parameters, what it needs, differences, reference."""
    idea, arguments, remarks = docstring(kind)
    rows = [(f"`{n}`", f"`{d}`", arguments.get(n, "")) for n, d in defaults(kind)]
    parts = [
        f"#### {kind.name}",
        f"`{kind.equation}`",
        *idea,
        table(("hyper-parameter", "default", "meaning"), rows) if rows else "No hyper-parameters.",
        " ".join(facts(kind)),
        *remarks,
        f"*{kind.paper}.* BibTeX `{kind.cite}`; `{kind.__name__}`." if kind.paper else f"`{kind.__name__}`.",
    ]
    return "\n\n".join(parts)


def facts(kind: Method) -> Iterator[str]:
    """What `fit` needs, what a score reads and what it costs; for a calibrator, whether it keeps the prediction."""
    learning = sentence(inspect.getdoc(kind.fit) or "")
    if not issubclass(kind, Detector | LiveDetector):
        yield f"**Fit:** {learning}"
        if issubclass(kind, Calibrator):
            yield f"**Keeps the prediction:** {'yes' if kind.preserves_argmax else 'not always'}."
        return
    wanted = {
        "nothing": "nothing.",
        "head": f"the head, no rows. {learning}",
        "train": f"training rows. {learning}",
    }
    fit = wanted[kind.needs].replace("training rows", "held-out labelled rows") if kind.held_out else wanted[kind.needs]
    yield f"**Fit:** {fit}"
    yield f"**Reads:** {', '.join(sorted(kind.reads))}."
    yield f"**Cost of a row:** {kind.cost}."
    if issubclass(kind, Detector) and kind.sweep:
        tried = "; ".join(f"`{name}` {', '.join(map(literal, values))}" for name, values in kind.sweep.items())
        yield f"**`tuned+{kind.name}` tries:** {tried}."


def docstring(kind: Method) -> tuple[list[str], dict[str, str], list[str]]:
    """Paragraphs before the arguments, the arguments, and paragraphs after them, each on one line."""
    blocks = [block for block in (inspect.getdoc(kind) or "").split("\n\n") if block.strip()]
    cut = next((i for i, block in enumerate(blocks) if block.startswith("Args:")), None)
    differing = next((i for i, block in enumerate(blocks) if block.startswith("Differs")), len(blocks))
    before, after = (blocks[:differing], blocks[differing:]) if cut is None else (blocks[:cut], blocks[cut + 1 :])
    return [one_line(b) for b in before], {} if cut is None else described(blocks[cut]), [one_line(b) for b in after]


def described(block: str) -> dict[str, str]:
    """Meanings by name from an `Args:` block, whose continuation lines are indented further."""
    found: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(block.partition("\n")[2]).splitlines():
        if line.startswith(" "):
            found[name] += " " + line.strip()
        else:
            name, _, meaning = line.partition(": ")
            found[name] = meaning.strip()
    return found


def defaults(kind: Method) -> list[tuple[str, str]]:
    """Hyper-parameters and the text of their defaults."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    return [(p.name, literal(p.default)) for p in parameters if p.name != "self"]


def literal(value: Any) -> str:
    """How a default is written on the command line."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def sentence(text: str) -> str:
    """The first paragraph of a docstring without the promise to return itself."""
    return one_line(text.partition("\n\n")[0]).removesuffix(" Returns itself.")


def one_line(text: str) -> str:
    """Text without its line breaks."""
    return " ".join(text.split())


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; bars inside cells are escaped."""
    lines = [list(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: list[str]) -> None:
    """Writes the page to the path given, or prints it."""
    if arguments:
        Path(arguments[0]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main(sys.argv[1:])
