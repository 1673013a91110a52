"""Who asks for recommendations: a user, a session, or whoever had the items of a history."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gateway.shop import Shop
from triton_recommender import Query, session_id
from triton_recommender.client import resolve_visitor


@dataclass(frozen=True)
class Visitor:
    """A visitor, with ids as the shop writes them, and what the answer must heed.

    session: identifies a visitor without a user id, or one whose user id is unknown
    history: item ids, newest first, in place of what the server knows
    """

    user: str | None = None
    session: str | None = None
    history: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    context: Mapping[str, str] = field(default_factory=dict)
    generation: int | None = None  # the generation that must answer, for testers; None: the experiment decides

    def list_ids(self, shop: Shop) -> list[int]:
        """Return the ids on the wire of user and session, as far as they are stated. Raises InvalidRequest."""
        user_ids = [] if self.user is None else [shop.parse_user_id(self.user)]
        return user_ids if self.session is None else [*user_ids, session_id(self.session)]

    def make_query(self, shop: Shop, known_ids: Collection[int]) -> Query:
        """Return the query with ids on the wire. Of user and session, it has the session where the user is unknown.

        known_ids: those of `list_ids` that have events
        Raises InvalidRequest.
        """
        session = self.session
        user_id = None if self.user is None else shop.parse_user_id(self.user)
        exclude = [shop.parse_item_id(item) for item in self.exclude]
        history = None if self.history is None else [shop.parse_item_id(item) for item in self.history]
        if session is not None and user_id is not None:
            user_id, session = (user_id, None) if user_id in known_ids else (None, session)
        return Query(user_id, history, exclude, self.context, session=session)

    def find_counted_id(self, shop: Shop) -> int | None:
        """Return the id on the wire by which experiments count the visitor and answers are logged. Raises InvalidRequest.

        It is the user's, known or not, otherwise the session's: a new user's first event moves nobody to another arm.
        """
        if self.user is not None:
            return shop.parse_user_id(self.user)
        return None if self.session is None else session_id(self.session)


def find_visitor_id(query: Query) -> int | None:
    """Return the id on the wire of a query's user or session, None without either.

    Raises InvalidRequest for a user id that is reserved for sessions.
    """
    visitor_id = resolve_visitor(query)
    return None if visitor_id is None else int(visitor_id)
