"""Layer 3, semantic: dialogue spans, prompt versions, forks. Knows no tensors and does no I/O."""

from kvos.sessions.manifest import SessionManifest
from kvos.sessions.messages import ROLES, Message, MessageInput, parse_messages
from kvos.sessions.registry import SessionRegistry
from kvos.sessions.rendering import ChatRenderer, Extension, Tokenizer
from kvos.sessions.session import CacheSession, SessionLimits, SessionState
from kvos.sessions.spans import BlockSpan, Span, SpanBlock, SpanKind, Transcript
from kvos.sessions.store import SavedSession, SessionStore

__all__ = [
    "ROLES",
    "BlockSpan",
    "CacheSession",
    "ChatRenderer",
    "Extension",
    "Message",
    "MessageInput",
    "SavedSession",
    "SessionLimits",
    "SessionManifest",
    "SessionRegistry",
    "SessionState",
    "SessionStore",
    "Span",
    "SpanBlock",
    "SpanKind",
    "Tokenizer",
    "Transcript",
    "parse_messages",
]
