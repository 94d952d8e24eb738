import pytest
import torch

from ood_toolkit.detectors.rankfeat import RankFeatDetector, without_rank_one
from ood_toolkit.models import Classifier
from ood_toolkit.testing import check_detector


@pytest.mark.parametrize(("channels", "positions"), [(8, 20), (20, 8), (6, 6), (5, 1)])
def test_the_rank_one_component_is_that_of_the_svd(channels, positions):
    layer = torch.randn(4, channels, positions).relu()
    for image, ours in zip(layer.double(), without_rank_one(layer), strict=True):
        u, s, v = torch.linalg.svd(image, full_matrices=False)
        torch.testing.assert_close(ours.double(), image - s[0] * torch.outer(u[:, 0], v[0]), rtol=1e-5, atol=1e-6)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block3 = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU())
        self.block4 = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3, stride=2, padding=1), torch.nn.ReLU())
        self.fc = torch.nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.block4(self.block3(images)).mean(dim=(2, 3)))


def _removed(maps: torch.Tensor) -> torch.Tensor:
    flat = maps.flatten(2)
    u, s, v = torch.linalg.svd(flat, full_matrices=False)
    return (flat - s[:, :1, None] * u[:, :, :1] @ v[:, :1]).view_as(maps)


@pytest.mark.parametrize("block", ["last", "before", "both"])
def test_it_is_the_papers_two_passes(block):
    net = Net().double()
    images = torch.rand(6, 3, 8, 8, dtype=torch.float64)
    outputs = Classifier(net, taps=("rank_one_removed",))(images)
    with torch.no_grad():
        before = net.block3(images)
        last = net.fc(_removed(net.block4(before)).mean(dim=(2, 3)))
        earlier = net.fc(net.block4(_removed(before)).mean(dim=(2, 3)))
    logits = {"last": last, "before": earlier, "both": (last + earlier) / 2}[block]
    detector = RankFeatDetector(block=block, temperature=2.0).fit(outputs)
    torch.testing.assert_close(detector(outputs), -2 * (logits / 2).logsumexp(dim=1))


def test_it_keeps_the_laws():
    check_detector(RankFeatDetector)
