"""The base class of all sections of a config file, and the types of their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def refuse_if(wrong: Callable[[Any], bool], message: str) -> BeforeValidator:
    """Returns a validator that raises `message` if `wrong(value)` is true, before the type is checked."""

    def check(value: Any) -> Any:
        if wrong(value):
            raise ValueError(message)
        return value

    return BeforeValidator(check)


def short_for(key: str) -> BeforeValidator:
    """Returns a validator that reads `optimizer: sgd` as `optimizer: {name: sgd}`, if the key is `name`."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


Positive = Annotated[int, Field(ge=1, le=1 << 62)]
NonNegative = Annotated[int, Field(ge=0, le=1 << 62)]
"""The bound keeps numbers of steps and samples within the integers that torch and the system count with."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""A time to wait for. The bound, about 30 years, keeps it within what clocks of the system can count."""


class Section(BaseModel):
    """The base class of all sections. It refuses unknown keys, values of the wrong type, and contradictions.

    It also refuses infinity and NaN: no key has a use for them, and an infinite learning rate gives weights of NaN.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def contradictions(self) -> Sequence[tuple[bool, str]]:
        """Returns pairs (condition, message) about values that do not fit together.

        The message of the first condition that is true is raised.
        """
        return ()

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        for contradictory, message in self.contradictions():
            if contradictory:
                raise ValueError(message)
        return self
