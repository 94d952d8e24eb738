"""`python -m ood_toolkit` is `ood-bench`, for launchers such as torchrun."""

from ood_toolkit.cli import main

main()
