"""One bounded question to the model hub: can this model be had from there now?

The hub's client retries each of its many requests and waits for each; behind a firewall that drops packets that
adds up to minutes. So kvos asks once, within a deadline, before it lets the library go there.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

__all__ = ["HubAnswer", "Reach", "reach_hub"]

REQUEST_SECONDS = 10.0
DEADLINE_SECONDS = 15.0
"""Longer than one request, because resolving a name has no timeout of its own."""


class Reach(Enum):
    """What the hub said."""

    AVAILABLE = "available"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """What the hub said, and why, in words; empty when it is available."""

    reach: Reach
    detail: str = ""


def reach_hub(
    model_id: str, *, offline: bool, endpoint: str | None = None, deadline_seconds: float = DEADLINE_SECONDS
) -> HubAnswer:
    """Ask for ``model_id`` and return within the deadline; at once when offline.

    ``endpoint`` is the hub's address, by default the one that its client is set up for.
    """
    if offline or constants.HF_HUB_OFFLINE:
        return HubAnswer(Reach.UNREACHABLE, "offline mode is set (KVOS_OFFLINE or HF_HUB_OFFLINE)")
    answers: list[HubAnswer] = []
    thread = threading.Thread(target=lambda: answers.append(_ask(model_id, endpoint)), daemon=True)
    thread.start()
    thread.join(deadline_seconds)
    if answers:
        return answers[0]
    return HubAnswer(Reach.UNREACHABLE, f"no answer within {deadline_seconds:g} s")


def _ask(model_id: str, endpoint: str | None) -> HubAnswer:
    try:
        HfApi(endpoint=endpoint).model_info(model_id, timeout=REQUEST_SECONDS)
    except HFValidationError as error:
        return HubAnswer(Reach.REFUSED, f"it is no hub id ({_short(error)})")
    except RepositoryNotFoundError:  # a gated model's error is one of these, too
        return HubAnswer(Reach.REFUSED, "it is unknown there, or private or gated and needs a login (`hf auth login`)")
    except Exception as error:  # noqa: BLE001  # the client's HTTP library differs between its versions
        return HubAnswer(Reach.UNREACHABLE, f"{type(error).__name__}: {_short(error)}")
    return HubAnswer(Reach.AVAILABLE)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
