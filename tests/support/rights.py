"""An auth manager whose users have exactly the permissions that a test grants."""

from __future__ import annotations

from typing import Any, ClassVar

from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser


class Rights(SimpleAuthManager):
    """Who may read the task instances and XComs of which DAGs and which connections, and start which DAGs, by user.

    Who may start a DAG may also read it.
    """

    dags: ClassVar[dict[str, set[str]]] = {}
    connections: ClassVar[dict[str, set[str]]] = {}
    triggers: ClassVar[dict[str, set[str]]] = {}
    xcoms: ClassVar[dict[str, set[str]]] = {}

    @classmethod
    def give(cls, user: str, dags: Any = (), connections: Any = (), triggers: Any = (), xcoms: Any = ()) -> None:
        cls.xcoms.setdefault(user, set()).update(xcoms)
        cls.triggers.setdefault(user, set()).update(triggers)
        cls.dags.setdefault(user, set()).update(dags)
        cls.connections.setdefault(user, set()).update(connections)

    @classmethod
    def token(cls, user: str, manager: SimpleAuthManager) -> str:
        return str(manager.generate_jwt(SimpleAuthManagerUser(username=user, role=None)))

    def is_authorized_dag(self, *, method: Any, user: Any, access_entity: Any = None, details: Any = None) -> bool:
        asked = (method, getattr(access_entity, "value", access_entity))
        rights = {("GET", "TASK_INSTANCE"): self.dags, ("POST", "RUN"): self.triggers, ("GET", "XCOM"): self.xcoms}
        rights["GET", None] = self.triggers
        given = rights.get(asked, {})
        return details.id in given.get(user.username, ())

    def is_authorized_connection(self, *, method: Any, user: Any, details: Any = None) -> bool:
        return method == "GET" and details.conn_id in self.connections.get(user.username, ())
