"""Attributes that are worked out when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class lazy(Generic[Value]):  # noqa: N801 - it is used as a decorator, as property is
    """As ``functools.cached_property``, of a frozen class, too.

    That one asks for the dict of the object, and CPython 3.11 then takes four times as long for each of its attributes.

    >>> class Circle:
    ...     radius = 2
    ...     @lazy
    ...     def width(self):
    ...         print("working")
    ...         return 2 * self.radius
    >>> circle = Circle()
    >>> circle.width, circle.width
    working
    (4, 4)
    """

    def __init__(self, make: Callable[[Any], Value]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> lazy[Value]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object | None, owner: type) -> Value | lazy[Value]:
        if instance is None:
            return self
        # Past __setattr__, as the class may be frozen. From now on the instance's own attribute comes first.
        value = self._make(instance)
        object.__setattr__(instance, self._name, value)
        return value
