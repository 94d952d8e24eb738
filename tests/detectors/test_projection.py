from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ood_toolkit.detectors.layers import join_layers
from ood_toolkit.detectors.projection import ProjectionDetector, ReActProjectionDetector, class_similarity
from ood_toolkit.outputs import Outputs
from ood_toolkit.testing import check_detector

KINDS = (ProjectionDetector, ReActProjectionDetector)


def literal(train: list[np.ndarray], labels: np.ndarray, test: list[np.ndarray]) -> np.ndarray:
    """The score by loops over rows, layers and classes; the last layer is the logits."""

    def trajectory(row: list[np.ndarray], means: list[list[np.ndarray]]) -> np.ndarray:
        odds = np.exp(row[-1] - row[-1].max())
        path = []
        for x, centres in zip(row, means, strict=True):
            value = 0.0
            for share, centre in zip(odds / odds.sum(), centres, strict=True):
                length = np.sqrt((x**2).sum())
                cosine = (x * centre).sum() / (length * np.sqrt((centre**2).sum()))
                value += share * length * cosine
            path.append(value)
        return np.array(path)

    means = [[layer[labels == c].mean(axis=0) for c in np.unique(labels)] for layer in train]
    paths = np.stack([trajectory([layer[i] for layer in train], means) for i in range(len(labels))])
    largest = paths.max(axis=0)
    reference = (paths / largest).mean(axis=0)
    return np.array(
        [
            -(trajectory([layer[i] for layer in test], means) / largest) @ reference / (reference @ reference)
            for i in range(len(test[0]))
        ]
    )


@pytest.fixture
def layered(outputs_like):
    """Outputs with two inner layers, and these layers as arrays."""

    def outputs(rows: int, seed: int) -> tuple[Outputs, list[np.ndarray]]:
        plain = outputs_like(rows, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        layers = [
            plain.features[:, :width] + 0.5 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
            for width in (3, 5)
        ]
        filled = replace(plain, taps={"block_maxima": join_layers(layers)})
        return filled, [layer.numpy() for layer in layers]

    return outputs


def test_it_is_the_loop(layered):
    (train, train_layers), (test, test_layers) = layered(200, 0), layered(30, 1)
    expected = literal([*train_layers, train.logits.numpy()], train.labels.numpy(), [*test_layers, test.logits.numpy()])
    scores = ProjectionDetector().fit(train)(test)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("threshold", [None, 1.0])
def test_with_react_the_features_are_clipped_before_the_head(layered, threshold):
    (train, train_layers), (test, test_layers) = layered(200, 0), layered(30, 1)
    cut = np.quantile(train.features.numpy(), 0.9) if threshold is None else threshold

    def arrays(outputs: Outputs, layers: list[np.ndarray]) -> list[np.ndarray]:
        features = np.minimum(outputs.features.numpy(), cut)
        return [*layers, features, features @ outputs.head.weight.numpy().T + outputs.head.bias.numpy()]

    expected = literal(arrays(train, train_layers), train.labels.numpy(), arrays(test, test_layers))
    scores = ReActProjectionDetector(threshold=threshold).fit(train)(test)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-9)


def test_the_mean_training_trajectory_scores_minus_one(layered):
    train, _ = layered(200, 0)
    assert float(ProjectionDetector().fit(train)(train).mean()) == pytest.approx(-1)


def test_a_similarity_is_the_rows_length_where_it_points_to_its_class():
    directions = torch.eye(3)
    rows = torch.tensor([[0.0, 4.0, 0.0], [3.0, 0.0, 4.0]])
    assert class_similarity(rows, directions, torch.eye(3)[[1, 0]]).tolist() == [4.0, 3.0]


def test_classes_without_rows_are_left_out_on_request(layered):
    (train, _), (test, _) = layered(200, 0), layered(30, 1)
    without = train.rows(train.labels != 1)
    with pytest.raises(ValueError, match=r"classes \[1\] have none"):
        ProjectionDetector().fit(without)
    detector = ProjectionDetector(absent="skip").fit(without)
    assert detector.present.tolist() == [True, False, True, True]
    inner = detector.trajectories(test)[:, 0]
    layer = test.taps["block_maxima"][:, :3]
    means = torch.stack([without.taps["block_maxima"][without.labels == c, :3].mean(dim=0) for c in (0, 2, 3)])
    cosines = torch.nn.functional.cosine_similarity(layer.unsqueeze(1), means.unsqueeze(0), dim=2)
    odds = test.logits[:, [0, 2, 3]].exp()  # all of the softmax goes to the classes that are there
    shares = odds / odds.sum(dim=1, keepdim=True)
    expected = (shares * cosines).sum(dim=1) * layer.norm(dim=1)
    torch.testing.assert_close(inner * detector.largest[0], expected)


def test_an_image_is_not_strange_because_its_class_has_no_rows(layered):
    (train, _), (test, _) = layered(200, 0), layered(30, 1)
    detector = ProjectionDetector(absent="skip").fit(train.rows(train.labels != 1))
    surer = replace(test, logits=test.logits + 50 * torch.nn.functional.one_hot(torch.tensor(1), 4))
    torch.testing.assert_close(detector.trajectories(surer)[:, :-1], detector.trajectories(test)[:, :-1])


def test_a_layer_that_is_always_zero_says_nothing(layered):
    (train, _), (test, _) = layered(200, 0), layered(30, 1)

    def deadened(outputs: Outputs) -> Outputs:
        dead = torch.zeros(len(outputs), 2, dtype=torch.float64)
        return replace(outputs, taps={"block_maxima": join_layers([outputs.taps["block_maxima"], dead])})

    plain, other = ProjectionDetector().fit(train), ProjectionDetector().fit(deadened(train))
    torch.testing.assert_close(other(deadened(test)), plain(test))


def test_training_images_that_are_zero_in_every_layer_leave_no_direction(layered):
    train, _ = layered(60, seed=0)
    dark = replace(
        train,
        logits=torch.zeros_like(train.logits),
        features=torch.zeros_like(train.features),
        taps={tap: value.where(value.isnan(), 0.0) for tap, value in train.taps.items()},
    )
    assert torch.equal(ProjectionDetector().fit(dark)(train), torch.zeros(60, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_it_keeps_the_laws(kind):
    check_detector(kind)
    check_detector(
        kind(tokens="max"), makers={"block_maxima(tokens='max')": lambda features, head, generator: features}
    )


def test_a_subclass_that_takes_no_layers_asks_for_the_default_tap():
    class Deepest(ProjectionDetector):
        """The logits' part of the trajectory alone."""

        name = "deepest"

        def __init__(self, absent: str = "error") -> None:
            super().__init__(tokens="max", absent=absent)

        def score(self, outputs: Outputs) -> Tensor:
            return -self.trajectories(outputs)[:, -1]

    assert Deepest().taps == ("block_maxima(tokens='max')",)
