"""Turns a config in the words of another program into a tree of shoal's keys, by a table of rules.

A table has the dotted keys of the other program. A key that ends in `.*` stands for everything inside of a section, and
for the section itself; a key of its own wins over it. What has no rule is reported and never lost. A null is what other
programs write for a key that is not set, so a key with a rule of its own is as if it were left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shoal.config.yaml import Sources, Tree, find_leaves, is_section, named
from shoal.errors import UserError, one_line, printable

UNKNOWN = "shoal does not know it"
"""The reason for a key that is in no table."""

Convert = Callable[[Any, Mapping[str, Any]], Any]
"""Returns our value for a foreign value; the second argument is the foreign section that the key is in."""


@dataclass(frozen=True)
class Idle:
    """The result of a conversion: this value is accepted and changes nothing."""

    why: str


@dataclass(frozen=True)
class Refused:
    """The result of a conversion: shoal cannot do what this value asks for."""

    why: str


@dataclass(frozen=True)
class Noted:
    """The result of a conversion: our value, and how what it does differs from what the foreign value did."""

    value: Any
    why: str


@dataclass(frozen=True)
class Rule:
    """What happens with one key of another program."""

    ours: str | tuple[str, ...] = ()
    """Our dotted key. Several, if the value sets them together: `convert` then returns a dict with some of them, whose
    values may be `Noted`. None,
    if there is no counterpart. A rule for `foreign.*` has `ours.*`."""
    convert: Convert | None = None
    """Makes our value, or returns `Noted`, `Idle` or `Refused`. None passes the value on as it is."""
    why: str = ""
    """Why a key without a counterpart has none and what to do instead, or a remark on one that has, for the docs."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Our keys that the rule sets."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours


def idle(why: str, ours: str = "") -> Rule:
    """Returns the rule of a key that is accepted with every value and changes nothing. `ours` is a key that is near."""
    return Rule(ours or (), lambda value, section: Idle(why), why)


Rules = Mapping[str, Rule]
"""Rules by the dotted keys of the other program."""


@dataclass(frozen=True)
class Remark:
    """Something to say about a foreign key."""

    key: str
    """The foreign key, dotted."""
    value: Any
    source: str
    """Where it was set, such as `guide.yaml:12`, or an empty text."""
    why: str

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{printable(self.key)[:300]}{where} = {self.value!r:.200}: {one_line(self.why, 600)}"


@dataclass(frozen=True)
class Translated:
    """A foreign tree in our words."""

    tree: Tree
    sources: Sources
    """Where each of our values was set and by which foreign key, by our dotted key."""
    idle: tuple[Remark, ...] = ()
    """The foreign keys that are accepted and change nothing."""
    refused: tuple[Remark, ...] = ()
    """The foreign keys that have no counterpart, or whose value has none."""
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The foreign keys that set each of our values, by our dotted key."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """How what a value does differs from what the foreign one did, by our dotted key."""


@dataclass
class _Setting:
    """A value of ours, and the foreign key that it comes from."""

    value: Any
    foreign: str
    foreign_value: Any
    others: list[str] = field(default_factory=list)
    """Other foreign keys that set the same value."""


@dataclass
class _Translation:
    rules: Rules
    sources: Sources
    together: Mapping[str, Mapping[str, Any]]
    """What conversions are given in place of a section, by its prefix, such as `training.`."""
    settings: dict[str, _Setting] = field(default_factory=dict)
    """What is set, by our dotted key."""
    inside: dict[str, str] = field(default_factory=dict)
    """For each section of ours in which something is set, one of the keys that are."""
    idle: list[Remark] = field(default_factory=list)
    refused: list[Remark] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    @cached_property
    def sections(self) -> set[str]:
        """The foreign sections that have rules for what is inside of them."""
        return {section for key in self.rules for section in [*_sections_around(key)][1:]}

    def add(self, section: Mapping[str, Any], prefix: str = "") -> None:
        """Translates the keys of a section, and of those inside of it."""
        for key, value in section.items():
            dotted = f"{prefix}{key}"
            rule = self.rules.get(dotted)
            if is_section(value) and value and (rule is None or dotted in self.sections):
                self.add(value, f"{dotted}.")
            elif rule is not None and value is None:
                continue  # null is what other programs write for a key that is not set
            elif rule is not None or (rule := _by_pattern(dotted, self.rules)) is not None:
                self.apply(rule, dotted, value, self.together.get(prefix, section))
            else:
                self.refused.append(self.remark(dotted, value, UNKNOWN))

    def apply(self, rule: Rule, dotted: str, value: Any, section: Mapping[str, Any]) -> None:
        result = value if rule.convert is None else rule.convert(value, section)
        if not rule.keys and not isinstance(result, Idle | Refused):
            result = Refused(rule.why)
        note = ""
        if isinstance(result, Noted):
            result, note = result.value, result.why
        if isinstance(result, Idle):
            self.idle.append(self.remark(dotted, value, result.why))
        elif isinstance(result, Refused):
            self.refused.append(self.remark(dotted, value, result.why))
        else:
            for ours, one in {rule.ours: result}.items() if isinstance(rule.ours, str) else result.items():
                ours_value, its_note = (one.value, one.why) if isinstance(one, Noted) else (one, note)
                self.put(ours, ours_value, dotted, value)
                if its_note:
                    self.notes.setdefault(ours, its_note)

    def put(self, ours: str, value: Any, foreign: str, foreign_value: Any) -> None:
        """Sets a value of ours. Raises UserError if another foreign key sets it, or a part of it, to something else."""
        sections = [*_sections_around(ours)][1:]
        clash = next((key for key in (ours, self.inside.get(ours), *sections) if key in self.settings), None)
        if clash is None:
            self.settings[ours] = _Setting(value, foreign, foreign_value)
            self.inside.update(dict.fromkeys(sections, ours))
            return
        other = self.settings[clash]
        if clash != ours or not _is_equal(value, other.value):
            raise UserError(
                f"{named(other.foreign, self.sources)} = {other.foreign_value!r:.200} and "
                f"{named(foreign, self.sources)} = {foreign_value!r:.200} both set {printable(clash)[:300]}; leave one "
                "of them out"
            )
        other.others.append(foreign)

    def remark(self, dotted: str, value: Any, why: str) -> Remark:
        return Remark(dotted, value, self.sources.get(dotted, ""), why)

    def source_of(self, ours: str, foreign: str) -> str:
        """Returns where a value was set, with the foreign key if it is another one than ours."""
        source = self.sources.get(foreign, "")
        return source if ours == foreign else ", ".join(filter(None, (source, f"written there as {foreign}")))


def translate(
    tree: Tree, sources: Sources, rules: Rules, together: Mapping[str, Mapping[str, Any]] | None = None
) -> Translated:
    """Returns a foreign tree in our words. Raises UserError if two foreign keys contradict each other.

    The caller decides what happens with keys that have no counterpart: a file that is trained is refused, and one that
    is rewritten as a config of ours has them as comments. `together` has what conversions are given in place of a
    section, by its prefix: words of `training.` may also stand at the top.
    """
    translation = _Translation(rules, sources, together or {})
    translation.add(tree)
    ours: Tree = {}
    for key, setting in translation.settings.items():
        *path, last = key.split(".")
        section = ours
        for part in path:
            section = section.setdefault(part, {})
        section[last] = setting.value
    our_sources = {
        leaf: translation.source_of(key, setting.foreign)
        for key, setting in translation.settings.items()
        for leaf in find_leaves(setting.value, key)
    }
    origins = {key: (one.foreign, *one.others) for key, one in translation.settings.items()}
    remarks = (tuple(translation.idle), tuple(translation.refused))
    return Translated(ours, our_sources, *remarks, origins=origins, notes=translation.notes)


def _by_pattern(dotted: str, rules: Rules) -> Rule | None:
    """Returns the rule of the nearest section that has one for everything inside of it, or None."""
    for section in _sections_around(dotted):
        if (rule := rules.get(f"{section}.*")) is not None and isinstance(rule.ours, str):
            return replace(rule, ours=rule.ours.removesuffix(".*") + dotted[len(section) :])
        if rule is not None:
            return rule
    return None


def _sections_around(dotted: str) -> Iterator[str]:
    """Yields the key itself and the sections around it, the innermost first."""
    while dotted:
        yield dotted
        dotted = dotted.rpartition(".")[0]


def _is_equal(one: Any, other: Any) -> bool:
    """Returns whether two values are the same. True is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
