"""Calibrators and ensembles on real logits: three EfficientNet-Lite networks on labelled ImageNet validation images.

Every second image calibrates, the others are scored. The labels file has a header line and tab-separated columns that
start with file name, WordNet id and class number.

    python benchmarks/calibration_real.py IMAGES_FOLDER LABELS.tsv --out benchmarks/results/calibration_real.md
"""

import argparse
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ood_toolkit import metrics, registry
from ood_toolkit.models import load_classifier

MEMBERS = ["demo:efficientnet_lite0", "demo:efficientnet_lite1", "demo:efficientnet_lite2"]


def member_logits(spec: str, files: list[Path]) -> Tensor:
    loaded = load_classifier(spec)
    parts = []
    with torch.inference_mode():
        for start in range(0, len(files), 20):
            images = [loaded.transform(Image.open(file).convert("RGB")) for file in files[start : start + 20]]
            parts.append(loaded.classifier(torch.stack(images)).logits)
            print(spec, start, flush=True)
    return torch.cat(parts).clone()


def row(name: str, log_probabilities: Tensor, labels: Tensor) -> str:
    p = log_probabilities.double().exp()
    p = (p / p.sum(dim=1, keepdim=True)).numpy()
    truth = labels.numpy()
    confidence, correct = metrics.top_label(p, truth)
    nll = -float(log_probabilities.double().gather(1, labels[:, None]).mean())
    columns = [100 * correct.mean(), nll, 100 * metrics.ece(confidence, correct), metrics.brier(p, truth)]
    return f"| {name} | " + " | ".join(f"{value:.4g}" for value in columns) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("labels", type=Path)
    parser.add_argument("--logits", type=Path, help="keeps the logits here between runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [line.split("\t") for line in options.labels.read_text().splitlines()[1:]]
    labels = torch.tensor([int(line[2]) for line in lines])
    if options.logits and options.logits.exists():
        members = torch.load(options.logits, weights_only=True)
    else:
        members = torch.stack([member_logits(spec, [options.images / line[0] for line in lines]) for spec in MEMBERS])
        if options.logits:
            torch.save(members, options.logits)
    fit, test = slice(0, None, 2), slice(1, None, 2)
    rows = []
    for spec, logits in zip(MEMBERS, members, strict=True):
        rows.append(row(f"{spec}, none", logits[test].log_softmax(1), labels[test]))
        scaled = registry.build_calibrator("temperature").fit(logits[fit], labels[fit])
        rows.append(row(f"{spec}, temperature", scaled.log_probabilities(logits[test]), labels[test]))
    for name in registry.ensemble_classes():
        pool = registry.build_ensemble(name).fit(members[:, fit], labels[fit])
        rows.append(row(f"ensemble, {name}", pool(members[:, test]), labels[test]))
    for name in registry.calibrator_classes():
        calibrator = registry.build_calibrator(name).fit(members[0, fit], labels[fit])
        rows.append(row(f"{MEMBERS[0]}, {name}", calibrator.log_probabilities(members[0, test]), labels[test]))
        print(rows[-1], flush=True)
    text = "\n".join(
        [
            "# Calibrators on real logits",
            "",
            f"{len(labels[fit])} images calibrate, {len(labels[test])} are scored, 1000 classes.",
            "",
            "    python benchmarks/calibration_real.py IMAGES LABELS",
            "",
            "| what | accuracy, % | NLL | ECE (15 equal-width), % | Brier |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


if __name__ == "__main__":
    main()
