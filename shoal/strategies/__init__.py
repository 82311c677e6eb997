"""Where a run is computed."""

from shoal.strategies.native import Objective, SingleStrategy, from_config

__all__ = ["Objective", "SingleStrategy", "from_config"]
