"""Where images come from."""

from ood_toolkit.datasets.images import ArrayImages as ArrayImages
from ood_toolkit.datasets.images import FolderImages as FolderImages
from ood_toolkit.datasets.images import ImageSet as ImageSet
