"""BDH, the Dragon Hatchling (arXiv:2509.26507): one set of weights for every level, linear attention over neurons."""

from shoal.models.bdh.model import BDH, BDHConfig

__all__ = ["BDH", "BDHConfig"]
