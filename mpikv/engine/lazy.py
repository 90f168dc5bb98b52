"""Attributes that are worked out when they are first asked for."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

Value = TypeVar("Value")


class lazy(cached_property[Value]):  # noqa: N801 - it is used as a decorator, as property is
    """A cached property that leaves the object's dict alone; a frozen class may have it, too.

    The base class asks for that dict, and CPython 3.11 then takes four times as long for each of the object's
    attributes.

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

    if not TYPE_CHECKING:  # the base class has the types

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            """Return the attribute, worked out now and stored in the instance; of a class, this property."""
            if instance is None:
                return self
            # Past __setattr__, as the class may be frozen. From now on the instance's own attribute comes first.
            value = self.func(instance)
            object.__setattr__(instance, self.attrname, value)
            return value
