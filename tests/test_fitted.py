import copy
import pickle

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from ood_toolkit.fitted import Fitted, NotFitted


class Learner(Fitted):
    name = "learner"
    means: Float[Tensor, "C D"]

    def __init__(self, ridge: float = 1e-6, mode: str = "full") -> None:
        super().__init__()
        self.ridge = ridge
        self.mode = mode

    def fit(self, means: Tensor) -> "Learner":
        self.means = means
        return self


class Deeper(Learner):
    name = "deeper"
    scale: Tensor


def test_what_is_not_learned_yet_says_what_to_do():
    with pytest.raises(NotFitted, match=r"Learner\(ridge=1e-06, mode='full'\) has not learned 'means' yet; call fit"):
        _ = Learner().means


def test_a_name_that_nobody_declared_is_an_ordinary_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = Learner().nonsense
    assert not hasattr(Learner(), "nonsense")


def test_what_is_learned_is_a_buffer_and_follows_the_module():
    learner = Learner().fit(torch.ones(2, 3))
    assert set(learner.state_dict()) == {"means"}
    assert learner.double().means.dtype == torch.float64


def test_an_unfitted_copy_loads_the_state_of_a_fitted_one():
    learner = Learner().fit(torch.arange(6.0).view(2, 3))
    copied = learner.clone()
    copied.load_state_dict(learner.state_dict())
    assert torch.equal(copied.means, learner.means)
    copied.means += 1
    assert learner.means[0, 0] == 0


def test_fitting_again_may_change_the_shape():
    learner = Learner().fit(torch.ones(2, 3)).fit(torch.ones(5, 4))
    assert learner.means.shape == (5, 4)
    other = Learner().fit(torch.zeros(1, 1))
    other.load_state_dict(learner.state_dict())
    assert torch.equal(other.means, torch.ones(5, 4))


def test_subclasses_inherit_what_is_declared():
    assert Deeper._learned == {"means", "scale"}
    assert Learner._learned == {"means"}


def test_pickle_and_deepcopy_keep_everything():
    learner = Learner(ridge=0.5).fit(torch.ones(2, 3))
    for copied in (pickle.loads(pickle.dumps(learner)), copy.deepcopy(learner)):
        assert repr(copied) == repr(learner)
        assert torch.equal(copied.means, learner.means)


def test_the_spec_names_only_what_differs_from_the_defaults():
    assert Learner().spec == "learner"
    assert Learner(mode="half").spec == "learner(mode='half')"
    assert Learner(0.5, "half").hyperparameters == {"ridge": 0.5, "mode": "half"}
