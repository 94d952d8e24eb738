"""Where images come from."""

from ood_toolkit.datasets.archives import TarImages as TarImages
from ood_toolkit.datasets.combined import JoinedImages as JoinedImages
from ood_toolkit.datasets.combined import SubsetImages as SubsetImages
from ood_toolkit.datasets.hub import HubImages as HubImages
from ood_toolkit.datasets.images import ArrayImages as ArrayImages
from ood_toolkit.datasets.images import FolderImages as FolderImages
from ood_toolkit.datasets.images import ImageSet as ImageSet
from ood_toolkit.datasets.shards import ShardImages as ShardImages
