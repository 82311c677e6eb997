"""BDH, the Dragon Hatchling (arXiv:2509.26507): all levels share one set of weights; attention is linear."""

from shoal.models.bdh.model import BDH, BDHConfig

__all__ = ["BDH", "BDHConfig"]
