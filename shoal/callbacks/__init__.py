"""What happens in a run besides its steps: the base class of callbacks, and the built-in ones, each in a file."""

from shoal.callbacks.callback import Callback

__all__ = ["Callback"]
