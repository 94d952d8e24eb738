"""When should I not believe my classifier? OOD detectors and calibrators, scored together."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ood_toolkit.calibrators import *  # noqa: F403
    from ood_toolkit.detectors import *  # noqa: F403
    from ood_toolkit.outputs import UNKNOWN as UNKNOWN
    from ood_toolkit.outputs import Head as Head
    from ood_toolkit.outputs import Outputs as Outputs

__version__ = "0.1.0"

# where the public names live that are not detectors or calibrators; `import ood_toolkit` itself loads none of them
_HOMES = {
    "UNKNOWN": "outputs",
    "Head": "outputs",
    "Outputs": "outputs",
    "NotFitted": "fitted",
    "Classifier": "models",
    "load_classifier": "models",
    "GuardedClassifier": "deploy",
    "Verdict": "deploy",
    "Record": "records",
    "Results": "notebook",
    "evaluate": "notebook",
}
_METHOD_ROOMS = ("detectors", "calibrators")
_ROOMS = (*_METHOD_ROOMS, "metrics", "models", "datasets", "benchmarks", "reporting")


def __getattr__(name: str) -> Any:
    import importlib

    if name in _ROOMS:
        return importlib.import_module(f"ood_toolkit.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"ood_toolkit.{_HOMES[name]}"), name)
    if name[:1].isupper():
        for room in _METHOD_ROOMS:
            module = importlib.import_module(f"ood_toolkit.{room}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'ood_toolkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    import importlib

    methods = {
        n for room in _METHOD_ROOMS for n in vars(importlib.import_module(f"ood_toolkit.{room}")) if n[0].isupper()
    }
    return sorted({*globals(), *_HOMES, *_ROOMS, *methods})
