"""What a chat is at one moment; the loop and the slash commands change it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from rich.console import Console

from kvos.runtime import Runtime, Session
from kvos.serving import SamplingParams

__all__ = ["Chat"]


@dataclass(slots=True)
class Chat:
    """One person, one runtime, and the session that they talk to now.

    Attributes:
        system: the system message that new sessions begin with; None leaves it to the model's template.
        over: the person wants to leave.
        own: names under which this chat hibernated or resumed a session, and may replace it.
    """

    runtime: Runtime
    console: Console
    session: Session
    sampling: SamplingParams
    system: str | None = None
    over: bool = False
    own: set[str] = field(default_factory=set)

    def note(self, text: str) -> None:
        """A dim remark; not part of the conversation."""
        self.console.print(text, style="dim", markup=False, soft_wrap=not self.console.is_terminal)

    def new_session(self, name: str | None) -> Session:
        """A session that holds the system message, if there is one.

        Raises:
            SessionExistsError, InvalidInputError
        """
        messages = None if self.system is None else {"role": "system", "content": self.system}
        return self.runtime.session(name, messages=messages)

    def free_name(self, wish: str) -> str:
        """``wish``, or with a number behind it if an open session is called that."""
        taken = {report.name for report in self.runtime.sessions()}
        names = (wish if number == 1 else f"{wish}-{number}" for number in count(1))
        return next(name for name in names if name not in taken)
